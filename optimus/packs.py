"""Tensors of a module that lie in one: the pack, its parts, and how gradients find their way.

A pack's members are the module's own parameters (or buffers), each a view of its part of the pack:
the same objects, names, shapes and values as before, for the state dict, the optimizer, hooks and
everybody else.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import torch
from torch import nn

View = tuple[str, tuple[Any, ...]]
"""A function of `torch` that returns a view of its first argument, and its other arguments."""


@dataclass(frozen=True)
class Part:
    """Where a member lies in its pack: the views that lead to it from the whole."""

    views: tuple[View, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a tensor laid out as the pack."""
        for name, arguments in self.views:
            whole = getattr(torch, name)(whole, *arguments)
        return whole


@dataclass(eq=False)
class Pack:
    """Tensors stored in `whole`: all `members` are parameters, or all of them buffers.

    The gradient goes to the parameters, as views; or, once an optimizer has adopted the pack, to
    `leaf`, which is `whole` as a parameter of its own. `give_back` is what that optimizer does to
    step on the parameters again. What lies between the parts is zero and has a gradient of zero: no
    optimizer that may step on packs changes it.
    """

    whole: torch.Tensor
    members: tuple[torch.Tensor, ...]
    parts: tuple[Part, ...]
    leaf: nn.Parameter | None = None
    give_back: Callable[[], None] | None = None

    @classmethod
    def of(
        cls, members: Sequence[torch.Tensor], parts: Sequence[Part], shape: Sequence[int]
    ) -> Pack:
        """Copy `members` into one tensor of `shape` and make each a view of its part."""
        first = members[0]
        # Memory made in inference mode could not be trained on later.
        with torch.inference_mode(False):
            whole = torch.zeros(tuple(shape), dtype=first.dtype, device=first.device)
            pack = cls(whole, tuple(members), tuple(parts))
            pack._fill()
        return pack

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The members of a pack of parameters."""
        return cast(tuple[nn.Parameter, ...], self.members)

    @property
    def holds_buffers(self) -> bool:
        """Whether its members are buffers, which no optimizer knows."""
        return not isinstance(self.members[0], nn.Parameter)

    @property
    def is_padded(self) -> bool:
        """Whether there is something between the parts."""
        return self.whole.numel() > sum(m.numel() for m in self.members)

    def is_intact(self) -> bool:
        """Whether every member still is its part of `whole` (`module.to()` moves it away)."""
        # In each step, for each member: without a line of Python for one.
        return list(map(torch.Tensor.data_ptr, self.members)) == self.addresses

    def restore(self) -> None:
        """Take members that have left in again, with the values they have now.

        All get new memory: somebody may go on with the old one, such as weights that were set aside
        for an evaluation, or a graph that has yet to run backward.
        """
        if self.is_intact():
            return
        with torch.inference_mode(False):
            self.whole = torch.zeros_like(self.whole)
            self._fill()
            if self.leaf is not None:
                self.leaf.data = self.whole
            self._note_addresses()

    def may_restore(self) -> bool:
        """Whether nobody could tell: what members that have left live in now is theirs alone."""
        gone = [m for m, a in zip(self.members, self.addresses, strict=True) if m.data_ptr() != a]
        if len(set(map(torch.Tensor.data_ptr, gone))) < len(gone):
            return False
        homes = Counter(m.untyped_storage()._cdata for m in gone)
        return all(_num_holders(m) == homes[m.untyped_storage()._cdata] for m in gone)

    def _fill(self) -> None:
        """Copy the members to `whole`, and have them live there."""
        with torch.no_grad():
            for member, part in zip(self.members, self.parts, strict=True):
                part.of(self.whole).copy_(member.detach())
            # After all copies: members may have changed places.
            for member, part in zip(self.members, self.parts, strict=True):
                member.data = part.of(self.whole)

    def _note_addresses(self) -> None:
        self.addresses = [part.of(self.whole).data_ptr() for part in self.parts]

    def make_leaf(self) -> nn.Parameter:
        """Let gradients gather in `leaf`, together with those that the parameters have already.

        A parameter that is used outside the graphs compiled with this pack still receives its
        gradient there; it is added to the leaf's at once.
        """
        leaf = self.leaf = nn.Parameter(self.whole)
        setattr(leaf, _LEAF, True)
        for parameter, part in zip(self.members, self.parts, strict=True):
            self._move_gradient(parameter, part)
            hook = functools.partial(self._move_gradient, part=part)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        return leaf

    def drop_leaf(self) -> None:
        """Let gradients go to the parameters again, that of a backward pass yet to come as well."""
        leaf, self.leaf = self.leaf, None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if leaf is not None:
            self._hand_over(leaf)
            leaf.register_post_accumulate_grad_hook(self._hand_over)

    def _hand_over(self, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:
            return
        for parameter, part in zip(self.members, self.parts, strict=True):
            share = part.of(gradient).to(parameter, copy=True)
            parameter.grad = share if parameter.grad is None else parameter.grad + share

    def release(self) -> None:
        """Have the optimizer that steps on the pack, if one does, step on the parameters again."""
        if self.leaf is not None and self.give_back is not None:
            self.give_back()

    def _move_gradient(self, parameter: torch.Tensor, part: Part) -> None:
        if self.leaf is None or parameter.grad is None:
            return
        if self.leaf.grad is None:
            self.leaf.grad = torch.zeros_like(self.whole)
        part.of(self.leaf.grad).add_(parameter.grad)
        parameter.grad = None

    def dissolve(self) -> None:
        """Give every member memory of its own again."""
        for member in self.members:
            member.data = member.detach().clone()

    def as_input(self, learning: Sequence[bool]) -> torch.Tensor:
        """The pack as an input of a graph, whose gradient reaches those in it that are `learning`.

        Others get none at all: an optimizer would take one of zeros for a gradient.
        """
        if not any(learning):
            return self.whole
        if self.leaf is not None:
            return self.leaf
        parts, members = compress(self.parts, learning), compress(self.members, learning)
        return cast(torch.Tensor, _Gather.apply(self.whole, tuple(parts), *members))  # type: ignore[no-untyped-call]

    def __post_init__(self) -> None:
        self._note_addresses()
        self._hooks: list[Any] = []


_LEAF = "_optimus_leaf"


def is_leaf_of_pack(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a pack's leaf, which no module has: none but an optimizer knows it."""
    return hasattr(tensor, _LEAF)


def objection(members: Sequence[torch.Tensor]) -> str | None:
    """Why `members` are not to be stored together; None if they may be."""
    first = members[0]
    if len(ids(members)) < len(members):
        return "a parameter stands twice in the stack"
    for m in members:
        is_usual = type(m) is type(first) and type(m) in (nn.Parameter, torch.Tensor)
        if not (is_usual and m.is_leaf):
            return "a parameter of a special class"
        if (m.dtype, m.device, m.requires_grad) != (first.dtype, first.device, first.requires_grad):
            return "parameters differ in type, device or requires_grad"
        if not m.is_contiguous() or m.untyped_storage().nbytes() != m.numel() * m.element_size():
            return "a parameter is a view or not contiguous"
        if _num_holders(m) > 1:
            return "somebody else holds the memory of a parameter, too"
    return None


def _num_holders(tensor: torch.Tensor) -> int:
    """How many tensors live in the memory that `tensor` lives in; 1 where PyTorch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)  # a private name
    storage = tensor.untyped_storage()  # holds the memory, too
    return count(storage._cdata) - 1 if count is not None else 1


def alignment_of(device: torch.device) -> int:
    """Bytes at whose multiples code compiled for `device` takes tensors to begin.

    Triton kernels of graphs that are compiled already, ours or the user's, read vectors of 16 bytes
    where a parameter was so aligned, and nothing looks again.
    """
    return 16 if device.type == "cuda" else 1


def misplaced(
    first: torch.Tensor, parts: Sequence[Part], shape: Sequence[int], alignment: int
) -> bool:
    """Whether members alike to `first` would not begin at multiples of `alignment` bytes.

    Single numbers need not: they are read alone.
    """
    whole = torch.empty(tuple(shape), dtype=first.dtype, device="meta")
    places = [part.of(whole) for part in parts]
    size = first.element_size()
    return any(p.numel() > 1 and p.storage_offset() * size % alignment for p in places)


def padded(
    first: torch.Tensor, parts: Sequence[Part], shape: Sequence[int], alignment: int
) -> tuple[list[Part], tuple[int, ...]] | None:
    """Parts and shape of a pack in which members alike to `first` do begin there.

    Of it the numbers of each member are a row, with room behind them. None if members are joined by
    anything but stacks: those of a cat may be of any sizes, and its result is one row.
    """
    if any(name != "select" for part in parts for name, _ in part.views):
        return None
    stacked = tuple(shape)[: len(shape) - first.dim()]
    step = alignment // first.element_size()
    row = (first.numel() + step - 1) // step * step
    dim = len(stacked)
    front = (
        ("narrow", (dim, 0, first.numel())),
        ("unflatten", (dim, tuple(first.shape))),
    )
    return [Part((*front, *part.views)) for part in parts], (*stacked, row)


def ids(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Identities of tensors."""
    return set(map(id, tensors))


def joined(members: Sequence[torch.Tensor], like: Pack) -> torch.Tensor:
    """Copies of `members` laid out as those of the pack `like`; gradients reach them."""
    return cast(torch.Tensor, _Join.apply(like, *members))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Forward: the members side by side, as they lie. Backward: each its part, as a view."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, parts: tuple[Part, ...], *members: torch.Tensor
    ) -> torch.Tensor:
        ctx.parts = parts
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *_shares(gradients[0], ctx.parts))


def _shares(gradient: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """What each part gets of the gradient of the whole, as a view."""
    # A batched GEMM's weight gradient comes transposed; one copy here saves one a parameter.
    whole = gradient.contiguous()
    return [part.of(whole) for part in parts]


class _Join(torch.autograd.Function):
    """Forward: copies of the members side by side. Backward: each its part, as a view."""

    @staticmethod
    def forward(ctx: Any, like: Pack, *members: torch.Tensor) -> torch.Tensor:
        ctx.parts = like.parts
        whole = torch.zeros_like(like.whole, dtype=members[0].dtype, device=members[0].device)
        for member, part in zip(members, like.parts, strict=True):
            part.of(whole).copy_(member)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        return (None, *_shares(gradients[0], ctx.parts))
