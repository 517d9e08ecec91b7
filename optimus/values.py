"""Fake values of nodes: computing them for new nodes and comparing them without adding guards."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optimus.legality import Context, memory_of, memory_of_one, value_of
from optimus.ops import op_of


class Unknown(Exception):
    """The value of a call cannot be told from the fake values of its inputs."""


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """The mode that the graph's fake values belong to; None when it has no fake value."""
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def is_transformed(graph: Graph) -> bool:
    """Whether part of the graph runs under a transform of torch.func (vmap, grad, ...).

    Values there are wrappers that mean nothing outside of it, neither their shape nor their memory.
    """
    functorch = getattr(torch._C, "_functorch", None)  # a private name
    ask = getattr(functorch, "is_functorch_wrapped_tensor", None)
    return ask is not None and any(_is_wrapped(value_of(node), ask) for node in graph.nodes)


def _is_wrapped(value: Any, ask: Callable[[torch.Tensor], bool]) -> bool:
    if isinstance(value, tuple | list):
        return any(_is_wrapped(part, ask) for part in value)
    return isinstance(value, torch.Tensor) and ask(value)


def evaluate(
    mode: FakeTensorMode,
    context: Context,
    target: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The fake value of a call, under the grad mode and autocast state of `context`.

    Raises Unknown when an input has no value, when the call fails on these inputs, or when it
    could only be computed by fixing a dynamic size.
    """
    fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), _known_value)
    if target is operator.getitem and isinstance(fake_args[0], tuple | list):
        return fake_args[0][fake_args[1]]
    guards = _num_guards(mode)
    try:
        with mode, enable_python_dispatcher(), context.active():
            if isinstance(target, str):
                value = getattr(fake_args[0], target)(*fake_args[1:], **fake_kwargs)
            else:
                value = target(*fake_args, **fake_kwargs)
    except Exception as error:
        raise Unknown(f"{_name(target)} fails here: {_first_line(error)}") from error
    if _num_guards(mode) != guards:
        raise Unknown(f"{_name(target)} would fix a dynamic size")
    return value


def requires_grad(value: Any) -> bool:
    """Whether a value, or any part of it, requires a gradient."""
    if isinstance(value, tuple | list):
        return any(map(requires_grad, value))
    return isinstance(value, torch.Tensor) and value.requires_grad


def same_type(one: Any, other: Any) -> bool:
    """Whether two values have equal shape, dtype, device and requires_grad (nested: each part).

    A conjugate, or what is negated, that is only marked so is of another type: views of its bits
    refuse it.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.device == other.device
            and one.layout == other.layout
            and one.requires_grad == other.requires_grad
            and _same_bits(one, other)
            and same_sizes(one.shape, other.shape)
        )
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same_type, one, other))
    return type(one) is type(other) and same_size(one, other)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()


def same_strides(one: Any, other: Any) -> bool:
    """Whether two values of the same type are also laid out in memory the same way.

    Where there is one index only, or no element, a stride says nothing.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout is not torch.strided or any(same_size(size, 0) for size in one.shape):
            return True
        each = zip(one.shape, one.stride(), other.stride(), strict=True)
        return all(same_size(size, 1) or same_size(a, b) for size, a, b in each)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same_strides, one, other))
    return True


def same_sizes(one: Any, other: Any) -> bool:
    """Whether two shapes are equal for every value of their dynamic sizes."""
    return len(one) == len(other) and all(map(same_size, one, other))


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes (or other plain values) are equal, for every value of dynamic ones."""
    if type(one) is int and type(other) is int:
        return one == other
    if isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt):
        return bool(statically_known_true(one == other))
    return bool(one == other)


def is_positive(size: int | torch.SymInt) -> bool:
    """Whether a size is at least 1, for every value of a dynamic one."""
    return bool(statically_known_true(size > 0))


def static_size(value: torch.Tensor, dim: int) -> int | None:
    """The size along `dim`, None when it is dynamic."""
    size = value.shape[dim]
    return size if isinstance(size, int) else None


def hint_of(sizes: Iterable[int | torch.SymInt]) -> int | None:
    """The product of sizes, dynamic ones as they are at hand; None where that is not known."""
    product = 1
    for size in sizes:
        hint = size if isinstance(size, int) else size.node.hint
        if hint is None:
            return None
        product *= int(hint)
    return product


def is_fresh(node: Node) -> bool:
    """Whether the node's value lives in memory of its own rather than in that of an input."""
    own = memory_of_one(node)
    return own.isdisjoint(memory_of(node.all_input_nodes))


def is_view(node: Node) -> bool:
    """Whether `node` only looks at memory of its input: moving it moves no work."""
    op = op_of(node)
    if op is None or op.kind != "view" or op.name == "detach":
        return False
    source = node.all_input_nodes[0]
    if op.name in _PARTING or isinstance(value_of(source), tuple | list):
        return True
    return memory_of_one(node) == memory_of_one(source)


# Always views; that all of a thousand parts live in one storage need not be read off each time.
_PARTING = ("split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind")


def _known_value(node: Node) -> Any:
    value = value_of(node)
    if value is None:
        raise Unknown(f"the value of {node.name} is not known")
    return value


def _num_guards(mode: FakeTensorMode) -> int:
    return len(mode.shape_env.guards) if mode.shape_env is not None else 0


def _name(target: Callable[..., Any] | str) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
