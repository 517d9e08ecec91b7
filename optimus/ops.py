"""Reading calls by name: which operation a node calls and with what arguments, however spelled.

Patterns anchor on the names of `optimus.vocabulary` and read arguments by canonical names.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from optimus.facts import Facts
from optimus.vocabulary import OPS, SPELLINGS, Kind, Op, Parameter, Spelling, Target

__all__ = [
    "OPS",
    "Kind",
    "Op",
    "arguments",
    "canonical_call",
    "is_canonical",
    "op_of",
    "out_of_place",
]


def op_of(node: Node) -> Op | None:
    """The operation that `node` calls under any of its spellings; None for what is not listed."""
    spelling = _spelling(node)
    return spelling.op if spelling is not None else None


def name_of(node: Node) -> str:
    """The name of the operation that `node` calls; empty for what is not listed."""
    op = op_of(node)
    return op.name if op is not None else ""


def arguments(node: Node) -> dict[str, Any] | None:
    """All of the call's arguments by canonical name, defaults filled in.

    None when the operation is not listed, or when the call says something that the canonical form
    cannot (an in-place flag, an `out=`, a scalar where a tensor stands, a wrong number of
    arguments).
    """
    values = _read(node)
    return None if values is None else dict(values)


def is_understood(node: Node) -> bool:
    """Whether `arguments` can tell what the call says."""
    return _read(node) is not None


def _read(node: Node) -> dict[str, Any] | None:
    known, target, args, kwargs = _READ.of, node.target, node.args, node.kwargs
    read = known.get(node)
    if (
        read is None
        or read.args is not args
        or read.kwargs is not kwargs
        or read.target is not target
    ):
        spelling = _spelling(node)
        values = _bind(spelling, node, writes=False) if spelling is not None else None
        read = known[node] = _Read(target, args, kwargs, values)
    return read.values


class _Read(NamedTuple):
    """What a call said when it was last read; patterns read most calls many times."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: dict[str, Any] | None


_READ = Facts[_Read]()


def out_of_place(node: Node) -> tuple[Op, dict[str, Any]] | None:
    """The operation and arguments that compute what an in-place call writes to its first argument.

    None when `node` is no in-place spelling (`x.add_(1)`, `x += 1`, `F.relu(x, inplace=True)`) of a
    listed operation.
    """
    target = node.target
    spelling = SPELLINGS.get(target) if node.op in ("call_function", "call_method") else None
    if spelling is None:
        spelling = SPELLINGS.get(_IN_PLACE.get(target, "")) or _without_underscore(target)
        values = _bind(spelling, node, writes=False) if spelling is not None else None
    else:
        values = _bind(spelling, node, writes=True)
    return (spelling.op, values) if spelling is not None and values is not None else None


def target_name(target: Target) -> str:
    """The name of a method, or of a function; empty for what has none."""
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _without_underscore(target: Target) -> Spelling | None:
    name = target_name(target)
    if not name.endswith("_") or name.endswith("__"):
        return None
    return SPELLINGS.get(name[:-1])  # a method's parameters are those of torch's function


_IN_PLACE: dict[Target, Target] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
}


def _bind(spelling: Spelling, node: Node, *, writes: bool) -> dict[str, Any] | None:
    """Arguments of a call that does, or does not, say that it writes in place."""
    args = _join_sizes(spelling, node.args) if isinstance(node.target, str) else node.args
    values = _match(spelling.slots, args, node.kwargs)
    if values is None:
        return None
    values.pop("_stacklevel", None)
    if values.pop("inplace", False) is not writes or values.pop("out", None) is not None:
        return None
    if isinstance(values.get("shape"), torch.dtype):  # Tensor.view(dtype) reads the bits anew
        return None
    if spelling.read is not None:
        return spelling.read(values)
    return _tensor_first(spelling.op, values)


def _match(
    slots: tuple[Parameter, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """As inspect's `Signature.bind` with defaults, in a fifth of the time; None if it fails."""
    values: dict[str, Any] = {}
    taken = 0
    named = {_KEYWORDS.get(k, k): v for k, v in kwargs.items()} if kwargs else {}
    for name, positional, takes_rest, default in slots:
        if takes_rest:
            values[name] = args[taken:]
            taken = len(args)
        elif positional and taken < len(args):
            values[name] = args[taken]
            taken += 1
        elif name in named:
            values[name] = named.pop(name)
        elif default is inspect.Parameter.empty:
            return None
        else:
            values[name] = default
    return None if named or taken < len(args) else values


# NumPy's names, which torch's own functions accept, and those of methods that differ.
_KEYWORDS = {
    "axis": "dim",
    "keepdims": "keepdim",
    "split_size": "split_size_or_sections",
    "split_sizes": "split_size_or_sections",
    "axis0": "dim0",
    "axis1": "dim1",
    "train": "training",
}


def canonical_call(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `op`, given by place or by canonical name, in canonical form.

    Raises TypeError when they do not fit its parameters.
    """
    values = _match(op.slots, args, kwargs)
    if values is None:
        raise TypeError(f"{op.name} takes ({', '.join(op.parameters)}), not {args} and {kwargs}")
    return op.build(values)


def is_canonical(node: Node) -> bool:
    """Whether `node` is a listed operation called through its canonical function and arguments."""
    op = op_of(node)
    if op is None or node.target is not op.target:
        return False
    values = arguments(node)
    return values is not None and op.build(values) == (node.args, node.kwargs)


def _spelling(node: Node) -> Spelling | None:
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target is operator.sub and node.args and not isinstance(node.args[0], Node):
        return SPELLINGS[torch.rsub]
    return SPELLINGS.get(node.target)


def _tensor_first(op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
    """Operators take a number on their left, functions do not: swap where that says the same."""
    if isinstance(values.get("input"), Node) or "other" not in values:
        return values
    if op.name in ("add", "mul", "rsub", "maximum", "minimum", "eq", "ne"):
        swapped = values | {"input": values["other"], "other": values["input"]}
        return swapped if values.get("alpha", 1) == 1 else None
    return None


def _join_sizes(spelling: Spelling, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The method `x.view(2, 3)` means `torch.reshape(x, (2, 3))`."""
    for position, parameter in enumerate(spelling.slots):
        if parameter.name in _SIZES and len(args) > position:
            if isinstance(args[position], list | tuple | torch.dtype):
                return args
            return (*args[:position], tuple(args[position:]))
    return args


_SIZES = ("shape", "dims", "size")
