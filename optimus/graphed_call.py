"""Replay a compiled graph's forward and backward as CUDA graphs, within autograd.

To its caller the call stays what it was: it takes new tensors and gives new tensors, and backward
hands a gradient to each leaf. In between the inputs are copied to where the recording reads them.
Parameters and buffers are read where they are, and so are inputs that are the same tensor in each
step. Only their gradients lie in the recording's memory, until the next backward of the same graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule

from optimus.call_recording import CallRecording, Compiled, is_number
from optimus.capture import (
    MOST_CHANGES,
    MOST_RECORDINGS,
    CaptureError,
    Session,
    Settling,
)
from optimus.constant_inputs import ConstantInputs
from optimus.leaf_gradients import hand_over, hidden, is_bare, move_out, small_leaves, will_set
from optimus.picking import picker
from optimus.values import requires_grad


def fixed_inputs(module: GraphModule) -> list[bool]:
    """Of each input of a graph from Dynamo, whether it is a parameter or a buffer of the model."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    # A private name; without it parameters are known by their class, and buffers that are written
    # keep their graph outside.
    marks = [node.meta.get("tensor_dict") or {} for node in nodes]
    return ["_dynamo_static_input_type" in mark for mark in marks]


class GraphedCall:
    """Stands in for one compiled graph, and replays it in training steps once it has settled.

    Runs outside: the first calls, until one was gone back through, calls without gradients or
    outside of training steps, inputs of another shape than those recorded, and a second call before
    the first one's backward.
    """

    def __init__(self, compiled: Compiled, fixed: Sequence[bool], session: Session) -> None:
        self.replays = 0
        self.outside = 0
        self.declined = ""
        self.last_step = 0
        self._compiled = compiled
        self._session = session
        self._device_type = session.capture.device.type
        self._constants = ConstantInputs()
        self._in_place: frozenset[int] = frozenset()
        self._fix(fixed)
        self._by_name = False
        self._settling = Settling()
        self._recordings = 0
        self._recording: CallRecording | None = None
        self._watched: dict[tuple[Any, ...], _Watched] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the compiled graph with its flat inputs."""
        if self.declined or not self._session.active or not _is_usual():
            return self._compiled(*args)
        key = self._key(args)
        if self._recording is not None and self._recording.key == key:
            self._settling.replayed()
            self._watched.clear()
            if not self._recording.pending:
                return self._replay(self._recording, args)
        elif self._settling.is_settled(key, self.is_recorded) and self._record(args, key):
            return self._replay(cast(CallRecording, self._recording), args)
        self.outside += 1
        return self._compiled(*args) if self.declined else self._run_outside(args, key)

    @property
    def is_recorded(self) -> bool:
        """Whether there is something to replay."""
        return self._recording is not None

    def begin_step(self) -> None:
        """What was not gone back through by now never will be."""
        if self._recording is not None:
            self._recording.pending = False

    def drop(self) -> None:
        """Forget what was recorded; its memory is free once nobody holds gradients in it."""
        if self._recording is not None:
            self._session.static -= self._recording.gradient_addresses()
        self._recording = None

    def _fix(self, fixed: Sequence[bool]) -> None:
        """Mark the inputs that stay where they are: the model's own, and others `_in_place`."""
        self._fixed = list(fixed)
        self._stay = [f or i in self._in_place for i, f in enumerate(fixed)]
        self._own = picker([i for i, stays in enumerate(self._stay) if stays])
        self._constant = picker(sorted(self._in_place))
        self._given = picker([i for i, f in enumerate(fixed) if not f])

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What must be the same in each replay. Dynamo has guarded types and modes before."""
        device = self._device_type
        own = self._own(args)
        # By their types leaves of packs differ from what hands its gradient on to parameters.
        own_key = tuple(map(torch.Tensor.data_ptr, own)), tuple(map(type, own))
        # A view of a constant input would be at its address, too; the recording keeps it alive.
        constant = tuple(map(id, self._constant(args)))
        return own_key, constant, tuple([_key_of(value, device) for value in self._given(args)])

    def _run_outside(self, args: Sequence[Any], key: tuple[Any, ...]) -> Any:
        """As without CUDA graphs, watching what would stand against them."""
        if self._recording is not None and self._recording.key == key:
            return self._compiled(*args)  # the second call in a step
        fixed = [f or isinstance(a, nn.Parameter) for a, f in zip(args, self._fixed, strict=True)]
        given = [a for a, f in zip(args, fixed, strict=True) if not f]
        device = self._session.capture.device
        reason = next((r for a in given if (r := _objection(a, device))), "")
        if reason:
            self._decline(reason)
            return self._compiled(*args)
        data = {i: a for i, a in enumerate(args) if not fixed[i] and _is_data(a, device)}
        self._constants.see(data)
        self._in_place &= self._constants.positions()
        self._fix(fixed)
        tensors = [a for a in given if isinstance(a, torch.Tensor)]
        versions = [t._version for t in tensors]
        outputs = self._compiled(*args)
        if versions != [t._version for t in tensors]:
            self._decline("it writes to its inputs")
        elif _storages(outputs) & _storages(args):
            self._decline("it returns a view of an input")
        else:
            key = self._key(args)
            self._settling.see(key)
            self._by_name |= any(watched.by_name for watched in self._watched.values())
            self._watched[key] = _Watched(outputs, small_leaves(args, fixed).values())
        if self._settling.changes > MOST_CHANGES:
            self._decline("the shapes or places of its inputs change from step to step")
        return outputs

    def _decline(self, reason: str) -> None:
        self.declined = reason
        self._session.note(f"a graph stays outside CUDA graphs: {reason}")
        self.drop()

    def _record(self, args: Sequence[Any], key: tuple[Any, ...]) -> bool:
        watched = self._watched[key]
        if watched.is_unused:
            return False  # backward compiles when it first runs, which no recording can hold
        if max(watched.backwards, default=0) > 1:
            self._decline("a step goes back through it more than once")
            return False
        if self._recordings == MOST_RECORDINGS:
            self._decline(f"it has changed {MOST_RECORDINGS} times")
            return False
        self.drop()  # first, so that its memory can be used again
        self._recordings += 1
        self._in_place = self._constants.positions()
        self._fix(self._fixed)
        try:
            self._recording = CallRecording(
                self._compiled,
                self._stay,
                args,
                watched.outputs,
                self._session,
                packed=hidden(args, self._fixed, self._by_name or watched.by_name),
                constant=self._in_place,
            )
            self._recording.key = self._key(args)
        except CaptureError as error:
            self._session.fail(f"a graph could not be recorded: {error}")
            self.declined = str(error)
            return False
        self._session.static |= self._recording.gradient_addresses()
        return True

    def _replay(self, recording: CallRecording, args: Sequence[Any]) -> Any:
        self.replays += 1
        self.last_step = self._session.step
        learning = [*recording.take_learning(args), *recording.stand_in]
        if not recording.differentiable or not learning:
            with torch.no_grad():
                return recording.outputs(recording.run_forward(args))
        return list(_Link.join(recording, self._session, args, *learning))


class _Link(torch.autograd.Function):
    """Joins a replayed forward to its replayed backward."""

    @classmethod
    def join(cls, *args: Any) -> Any:
        """What `apply` does where no transform of functorch is active, in 5 us less: without a line
        of Python for each leaf that might have outlived one."""
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @staticmethod
    def forward(
        ctx: Any,
        recording: CallRecording,
        session: Session,
        args: Sequence[Any],
        *learning: torch.Tensor,
    ) -> Any:
        outputs = recording.outputs(recording.run_forward(args))
        ctx.recording, ctx.session, ctx.serial = recording, session, recording.serial
        # Not the other inputs: they are only kept until backward where it needs them.
        ctx.kept = recording.take_kept(learning)
        ctx.packed = recording.take_packed(args)
        ctx.constant = recording.take_constant(args)
        ctx.versions = list(map(_VERSION, ctx.constant))
        ctx.set_materialize_grads(False)
        if recording.without_gradient:
            ctx.mark_non_differentiable(*(outputs[i] for i in recording.without_gradient))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # With create_graph the gradients say, once asked, that they have none themselves.
        back = _back_once if torch.is_grad_enabled() else _back
        return back(ctx, *gradients)


def _back(ctx: Any, *gradients: Any) -> Any:
    recording: CallRecording = ctx.recording
    if not recording.pending or recording.serial != ctx.serial:
        raise RuntimeError(
            "cuda_graphs=step: backward through a compiled graph a second time, or in a later "
            "step than its forward, when in the first steps there was one backward a forward. "
            "The activations are overwritten by then: train this model with cuda_graphs=off"
        )
    if list(map(_VERSION, ctx.constant)) != ctx.versions:
        raise RuntimeError(
            "cuda_graphs=step: an input of a compiled graph that was the same tensor in each step "
            "was written to between forward and backward, which reads it"
        )
    move_out((*ctx.kept, *ctx.packed), ctx.session.static)
    incoming = [gradients[i] for i in recording.differentiable]
    found = recording.run_backward(incoming, ctx.session.static)
    own, packed = found[: len(recording.learning)], found[len(recording.learning) :]
    handed = recording.gradients(own)
    to_set = will_set(ctx.next_functions, recording.edges_of_leaves, recording.edge_of_stand_in)
    for n, leaf, is_set in zip(recording.kept_at, ctx.kept, to_set, strict=False):
        gradient = own[n]
        if gradient is None or not leaf.requires_grad:  # frozen meanwhile
            continue
        # By .data a tensor of its own in the same memory, in half the time that detach() takes.
        if is_set and is_bare(leaf):
            leaf.grad = gradient.data
        else:
            handed[n] = gradient.clone() if n in recording.kept_of_constant else gradient.data
    if packed and to_set[-1]:
        hand_over(ctx.packed, packed)
    return None, None, None, *handed, *(None for _ in recording.stand_in)


def _is_usual() -> bool:
    """Whether gradients are wanted, and are autograd's own."""
    return torch.is_grad_enabled() and not _transforms_are_active()


_transforms_are_active: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)  # a private name
_VERSION = attrgetter("_version")
_back_once = once_differentiable(_back)


class _Watched:
    """What is known of a call that ran outside.

    `outputs` are like its outputs, without memory; `backwards` counts how often backward comes
    through each; `by_name` is whether one of these did anything but set the gradients of all of
    the `leaves`.
    """

    def __init__(self, outputs: Sequence[Any], leaves: Iterable[torch.Tensor]) -> None:
        self.by_name = False
        self._edges = [get_gradient_edge(leaf) for leaf in leaves]
        self.outputs = [_like(output) for output in outputs]
        self.backwards = [0] * len(outputs)
        for i, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(functools.partial(self._count, i))

    @property
    def is_unused(self) -> bool:
        """Whether it could have been gone back through and was not."""
        return any(map(requires_grad, self.outputs)) and not any(self.backwards)

    def _count(self, index: int, gradient: torch.Tensor) -> None:
        self.backwards[index] += 1
        self.by_name |= not all(will_set(self._edges, range(len(self._edges))))


def _key_of(value: Any, device_type: str) -> Any:
    """Of an input that is not the model's own, what must be the same in each replay."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_number(value, device_type):
        return value.item()
    return value.shape, value.stride()


def _is_data(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and not is_number(value, device.type)


def _objection(value: Any, device: torch.device) -> str:
    """Why an input that is not the model's own cannot be copied to a fixed place."""
    if not _is_data(value, device):
        return ""
    if value.device != device and value.device.type != device.type:
        return f"an input is on {value.device}, where a recording would not see it change"
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided:
        return f"an input is a {type(value).__name__} of layout {value.layout}"
    if value.is_inference():
        return "an input was made in inference mode"
    sizes = zip(value.shape, value.stride(), strict=True)
    if any(stride == 0 and size > 1 for size, stride in sizes):
        return "an input is expanded: its elements share memory"
    return ""


def _like(output: Any) -> torch.Tensor | None:
    """Shape, type and need of a gradient of an output, without its memory."""
    if not isinstance(output, torch.Tensor):
        return None
    like = torch.empty_like(output.detach(), device="meta")
    return like.requires_grad_(output.requires_grad)


def _storages(values: Sequence[Any]) -> set[int]:
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.numel()]
    return {t.untyped_storage().data_ptr() for t in tensors}
