"""Fake values of calls, by the shortest way: views by PyTorch itself, the rest once for all alike.

A graph of many equal branches makes the same few calls over and over, and `values.evaluate`, which
says what they return, takes a millisecond for some. PyTorch's fake mode remembers results, too, but
takes a call on another piece of a tensor for another call. Yet where a listed operation returns new
memory, its type and layout follow from those of the inputs, wherever in memory they begin; so does
the place of a view in its source. A first view is taken of a tensor without data, as fast as any.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.utils._mode_utils import no_dispatch

from optimus.legality import Context, storages_of, value_of
from optimus.values import evaluate
from optimus.vocabulary import SPELLINGS


class Evaluator:
    """Computes fake values of calls; `values.evaluate` is its definition."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Hashable, _Fresh | _Seen] = {}

    def __call__(
        self,
        context: Context,
        target: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The value of a call under `context`; raises Unknown as `values.evaluate` does."""
        if target is operator.getitem and isinstance(items := value_of(args[0]), tuple | list):
            return items[args[1]]
        tensors: list[FakeTensor] = []
        spelling = SPELLINGS.get(target)
        try:
            inputs = _alike((args, kwargs), tensors)
        except _Unlike:
            spelling = None
        if spelling is None:
            return evaluate(self._mode, context, target, args, kwargs)
        key = (target, context.grad, context.autocast, inputs)
        known = self._known.get(key)
        if known is not None:
            return known.another(self._mode, tensors)
        value, result = self._first(context, target, args, kwargs, tensors)
        if result is not None:
            self._known[key] = result
        return value

    def _first(
        self,
        context: Context,
        target: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[FakeTensor],
    ) -> tuple[Any, _Fresh | _Seen | None]:
        """The value of a call on `tensors` that none was like so far, and how to have it again."""
        kind = SPELLINGS[target].op.kind
        try:
            if kind == "view" and len(tensors) == 1:
                value = self._view(context, target, args, kwargs, tensors[0])
                return value, _seen(value, tensors[0])
            if kind == "join" and callable(target) and _is_one_type(tensors):
                joined = _join(context, target, args, kwargs, tensors[0])
                return joined.another(self._mode, tensors), joined
        except Exception:  # whatever PyTorch raises where the call fails
            return evaluate(self._mode, context, target, args, kwargs), None
        value = evaluate(self._mode, context, target, args, kwargs)
        return value, _fresh(value, tensors)

    def _view(
        self,
        context: Context,
        target: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source: FakeTensor,
    ) -> Any:
        """A call on `source` made on a tensor without data in the same place of the same memory."""
        with no_dispatch(), context.active():
            twin = torch.empty(0, dtype=source.dtype, device="meta")
            start, memory = source.storage_offset(), source.untyped_storage()
            twin.set_(memory, start, source.shape, source.stride())
            twin.requires_grad_(source.requires_grad)
            real_args, real_kwargs = torch.fx.map_arg((args, kwargs), lambda node: twin)
            if isinstance(target, str):
                value = getattr(twin, target)(*real_args[1:], **real_kwargs)
            else:
                value = target(*real_args, **real_kwargs)

        def fake(part: torch.Tensor) -> torch.Tensor:
            return source if part is twin else FakeTensor(self._mode, part, source.device)

        return type(value)(map(fake, value)) if isinstance(value, tuple | list) else fake(value)


class _Unlike(Exception):
    """An input whose type and layout do not say all that counts."""


def _alike(value: Any, tensors: list[FakeTensor]) -> Hashable:
    """Equal for inputs that make calls alike; tensors among them are added to `tensors`."""
    if isinstance(value, Node):
        tensor = value_of(value)
        tensors.append(tensor)
        return _type_of(tensor)
    if isinstance(value, tuple | list):
        return tuple([_alike(part, tensors) for part in value])
    if isinstance(value, dict):
        return tuple([(name, _alike(part, tensors)) for name, part in value.items()])
    if isinstance(value, slice):
        return ("slice", _alike((value.start, value.stop, value.step), tensors))
    if type(value) not in _PLAIN:
        raise _Unlike
    return (type(value), repr(value) if isinstance(value, float) else value)


_PLAIN: set[type] = {int, float, bool, str, type(None), type(...)}
_PLAIN |= {torch.dtype, torch.device, torch.memory_format, torch.layout}


def _type_of(tensor: Any) -> tuple[Any, ...]:
    """Type and layout of a plain fake tensor; raises _Unlike for any other value."""
    if (
        type(tensor) is not FakeTensor
        or tensor.layout is not torch.strided
        or tensor._has_symbolic_sizes_strides
        or tensor.constant is not None
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        raise _Unlike
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


@dataclass(frozen=True)
class _Fresh:
    """A result in memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def another(self, mode: FakeTensorMode, inputs: Sequence[FakeTensor]) -> torch.Tensor:
        """One more value of this kind."""
        with no_dispatch():
            value = torch.empty_strided(
                self.shape,
                self.stride,
                dtype=self.dtype,
                device="meta",
                requires_grad=self.requires_grad,
            )
        return FakeTensor(mode, value, self.device)


@dataclass(frozen=True)
class _Seen:
    """How a view lies in the memory of its source, `start` elements behind the source's first."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool

    def another(self, mode: FakeTensorMode, inputs: Sequence[FakeTensor]) -> torch.Tensor:
        """The same view of another source of the same type and layout."""
        source = inputs[0]
        with no_dispatch():
            view = torch.empty(0, dtype=source.dtype, device="meta")
            start = source.storage_offset() + self.start
            view.set_(source.untyped_storage(), start, self.shape, self.stride)
            view.requires_grad_(self.requires_grad)
        return FakeTensor(mode, view, source.device)


def _is_one_type(tensors: Sequence[FakeTensor]) -> bool:
    """Whether all are alike, and of the one type that autocast lets be joined as it is."""
    return tensors[0].dtype is torch.float32 and len(set(map(_type_of, tensors))) == 1


def _join(
    context: Context,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: FakeTensor,
) -> _Fresh:
    """What a call returns that joins many tensors like `part`. PyTorch's fake mode takes them one
    by one, and long for each; here one without data stands for all."""
    with no_dispatch(), context.active():
        twin = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
        twin.requires_grad_(part.requires_grad)
        real_args, real_kwargs = torch.fx.map_arg((args, kwargs), lambda node: twin)
        value = target(*real_args, **real_kwargs)
    sizes = value.shape, value.stride()
    return _Fresh(*sizes, value.dtype, part.device, value.requires_grad)


def _seen(value: Any, source: FakeTensor) -> _Seen | None:
    """What a call returned, if that is one view of `source` that reads its elements as they are."""
    if value is source or not isinstance(value, torch.Tensor):
        return None
    as_it_is = value.dtype == source.dtype and not value.is_conj() and not value.is_neg()
    if not as_it_is or storages_of(value) != storages_of(source):
        return None
    start = value.storage_offset() - source.storage_offset()
    if not isinstance(start, int):
        return None
    return _Seen(start, value.shape, value.stride(), value.requires_grad)


def _fresh(value: Any, inputs: Sequence[torch.Tensor]) -> _Fresh | None:
    """What a call on `inputs` returned, if that is one whole tensor in new memory."""
    try:
        result = _Fresh(*_type_of(value))
    except _Unlike:
        return None
    shared = storages_of(value) & storages_of(inputs)
    return None if shared or value.storage_offset() else result
