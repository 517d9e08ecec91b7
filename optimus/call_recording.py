"""A compiled graph's forward and backward, recorded in fixed memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, cast

import torch

from optimus.capture import CaptureError, Recorded, Results, Session
from optimus.picking import picker
from optimus.values import requires_grad

Compiled = Callable[..., Any]


class CallRecording:
    """A graph's forward and backward in fixed memory.

    `learning` are the positions of inputs that require gradients, `differentiable` those of outputs
    that have them. `kept_at` are those among the learning ones that are the model's own leaves: the
    memory of their gradients stays the recording's. So does that of the gradients of `packed`, of
    inputs that autograd is told nothing of but by `stand_in`. `constant` are inputs that are read
    where they are though they are not the model's own; `kept_of_constant` is what `kept_at` has of
    them. While `pending`, forward has run and
    backward not yet.
    """

    def __init__(
        self,
        compiled: Compiled,
        fixed: Sequence[bool],
        args: Sequence[Any],
        outputs: Sequence[torch.Tensor | None],
        session: Session,
        *,
        packed: Set[int],
        constant: Set[int] = frozenset(),
    ) -> None:
        self.key: tuple[Any, ...] = ()
        self.pending = False
        self.serial = 0
        self._compiled = compiled
        self._live: Sequence[Any] = ()
        device = session.capture.device
        self._arguments = [_place(a, f, device) for a, f in zip(args, fixed, strict=True)]
        self._copies = [
            ([self._arguments[i] for i in at], picker(at))
            for at in _by_type(_copied(args, fixed, device))
        ]
        learning = [i for i, a in enumerate(self._arguments) if requires_grad(a)]
        self.packed = [i for i in learning if i in packed]
        self.learning = [i for i in learning if i not in packed]
        self.stand_in = [torch.zeros((), device=device, requires_grad=True)] if self.packed else []
        self._are_leaves = [args[i].is_leaf for i in self.learning]
        self._kept = [fixed[i] and args[i].is_leaf for i in self.learning]
        self.kept_at = [n for n, keep in enumerate(self._kept) if keep]
        self.kept_of_constant = {n for n in self.kept_at if self.learning[n] in constant}
        self.edge_of_stand_in = len(self.learning) if self.packed else None
        self.edges_of_leaves = [*self.kept_at, *([len(self.learning)] if self.packed else [])]
        self.take_learning = picker(self.learning)
        self.take_packed = picker(self.packed)
        self.take_kept = picker(self.kept_at)
        self.take_constant = picker(sorted(constant))
        self._constant = self.take_constant(args)
        self.differentiable = [i for i, o in enumerate(outputs) if requires_grad(o)]
        self.without_gradient = [i for i, o in enumerate(outputs) if _is_constant(o)]
        self._results_by_type = _by_type(
            {i: o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)}
        )
        self._device_type = device.type
        self._incoming = [
            torch.zeros_like(cast(torch.Tensor, outputs[i]), device=device, requires_grad=False)
            for i in self.differentiable
        ]
        self._gradients: Results = []
        work = [self._forward]
        if self.differentiable and learning:
            work.append(self._backward)
        self._recorded: list[Recorded] = session.record(work)

    def gradient_addresses(self) -> set[int]:
        """Where gradients of parameters are, as far as known."""
        return {g.data_ptr() for g in self._gradients if g is not None}

    def run_forward(self, args: Sequence[Any]) -> Results:
        """Copy the inputs in and replay; the results are overwritten by the next replay.

        To be called without gradients.
        """
        for places, pick in self._copies:
            torch._foreach_copy_(places, cast("list[torch.Tensor]", pick(args)))
        self.pending = bool(self.differentiable)
        self.serial += 1
        return self._recorded[0].replay()

    def run_backward(self, incoming: Sequence[torch.Tensor | None], static: set[int]) -> Results:
        """Gradients of inputs, at `learning` and then `packed`; overwritten by the next replay.

        Their addresses are added to `static`.
        """
        self.pending = False
        for place, gradient in zip(self._incoming, incoming, strict=True):
            place.zero_() if gradient is None else place.copy_(gradient)
        found = self._recorded[1].replay()
        if found is not self._gradients:
            self._gradients = found
            static |= self.gradient_addresses()
        return found

    def _forward(self) -> Results:
        self._live = self._compiled(*self._arguments)
        return [o.detach() if isinstance(o, torch.Tensor) else o for o in self._live]

    def _backward(self) -> Results:
        live, self._live = self._live, ()
        at = [*self.learning, *self.packed]
        kept = [*self._kept, *(True for _ in self.packed)]
        # Recorded within the user's forward, but backward never runs under autocast.
        with torch.autocast(self._device_type, enabled=False):
            gradients = torch.autograd.grad(
                [live[i] for i in self.differentiable],
                [self._arguments[i] for i in at],
                self._incoming,
                allow_unused=True,
            )
        if any(g is not None and g.layout != torch.strided for g in gradients):
            raise CaptureError("a gradient is sparse")
        # In the layout that a parameter's gradient has: in another one it is copied outside.
        self._gradients = [
            _laid_out(g, self._arguments[i]) if keep and g is not None else g
            for i, g, keep in zip(at, gradients, kept, strict=True)
        ]
        _part_company(self._gradients, kept)
        return self._gradients

    def outputs(self, results: Results) -> Results:
        """Copies of forward's results, those of one type made together."""
        outputs = list(results)
        for at in self._results_by_type:
            own = cast("list[torch.Tensor]", [results[i] for i in at])
            copies = [torch.empty_like(result) for result in own]
            torch._foreach_copy_(copies, own)
            for i, copy in zip(at, copies, strict=True):
                outputs[i] = copy
        return outputs

    def gradients(self, found: Results) -> Results:
        """Gradients that their receivers may keep, of the inputs at `learning`; None in the place
        of those at `kept_at`."""
        return [
            None if g is None or keep else _copy_of(g, self._arguments[i], leaf)
            for i, g, keep, leaf in zip(
                self.learning, found, self._kept, self._are_leaves, strict=True
            )
        ]


def is_number(value: torch.Tensor, device_type: str) -> bool:
    """Whether it is a Python number, as Dynamo passes those that change: a recording keeps it."""
    return device_type != "cpu" and value.device.type == "cpu" and not value.dim()


def _copied(
    args: Sequence[Any], fixed: Sequence[bool], device: torch.device
) -> dict[int, torch.Tensor]:
    """The inputs, by position, that are copied to where the recording reads them."""
    return {
        i: value
        for i, (value, stays) in enumerate(zip(args, fixed, strict=True))
        if not stays and isinstance(value, torch.Tensor) and not is_number(value, device.type)
    }


def _by_type(tensors: dict[int, torch.Tensor]) -> list[list[int]]:
    """Positions of those of one type each: only such are copied in one kernel."""
    found: dict[torch.dtype, list[int]] = {}
    for i, tensor in tensors.items():
        found.setdefault(tensor.dtype, []).append(i)
    return list(found.values())


def _place(value: Any, fixed: bool, device: torch.device) -> Any:
    """What a recording reads in place of an input."""
    if not isinstance(value, torch.Tensor):
        return value
    if not fixed and is_number(value, device.type):
        return value.clone()
    if fixed:
        # Not the parameter itself, whose accumulation of gradients belongs to another stream.
        return value.detach().requires_grad_(value.requires_grad)
    place = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return place.requires_grad_(value.requires_grad)


def _laid_out(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient itself if it lies as autograd wants a leaf's to lie, else a copy that does."""
    if gradient.stride() == like.stride():
        return gradient
    return torch.empty_like(like, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _part_company(gradients: list[torch.Tensor | None], kept: Sequence[bool]) -> None:
    """Copy gradients of parameters that lie where another's does: each is written to in place."""
    taken: list[tuple[int, int]] = []
    for i, (gradient, keep) in enumerate(zip(gradients, kept, strict=True)):
        if gradient is None or not keep or not gradient.numel():
            continue
        begin, end = _extent(gradient)
        if any(begin < e and b < end for b, e in taken):
            gradients[i] = gradient.clone()
        else:
            taken.append((begin, end))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor and the one behind its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _copy_of(gradient: torch.Tensor, like: torch.Tensor, leaf: bool) -> torch.Tensor:
    """A copy; of a leaf's gradient, so that autograd need not make another."""
    copy = _laid_out(gradient, like) if leaf else gradient
    return gradient.clone() if copy is gradient else copy


def _is_constant(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and not output.requires_grad
