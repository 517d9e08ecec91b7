"""A graph as text that reads like code: one line a call, with shapes; repeated branches once."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from optimus.legality import value_of
from optimus.ops import op_of

LEAST_REPEATS = 3
LONGEST_BLOCK = 60


def listing(graph: Graph, marked: Collection[str] = (), mark: str = "*") -> str:
    """`graph` as text; lines of the nodes named in `marked` begin with `mark`.

    Parameters and buffers are named as in the model, and listed first; parts of a tuple are written
    where they are read. Blocks of lines that repeat but for their names are written once.
    """
    lines = [
        _line(node, mark if node.name in marked else " ") for node in graph.nodes if shown(node)
    ]
    return "\n".join([*_state_lines(graph), *_collapsed(lines)])


def shown(node: Node) -> bool:
    """Whether a node is a step of its own: no parameter, buffer or part of a tuple."""
    return not is_state(node) and not is_part(node)


def is_state(node: Node) -> bool:
    """Whether a node stands for a parameter or buffer of the model."""
    return node.op == "get_attr" or (
        node.op == "placeholder"
        and (isinstance(value_of(node), torch.nn.Parameter) or bool(_STATE.match(node.name)))
    )


def is_part(node: Node) -> bool:
    """Whether a node takes one entry of a tuple."""
    return node.target is operator.getitem and isinstance(
        value_of(node.all_input_nodes[0]), tuple | list
    )


def name_of(node: Node) -> str:
    """What to call a node: parameters by their names in the model, parts by their place."""
    if is_part(node):
        return f"{name_of(node.all_input_nodes[0])}[{_said(node.args[1], name_of)}]"
    found = _STATE.match(node.name)
    if is_state(node) and found:
        modules = (found["modules"] or "").removeprefix("modules_").split("_modules_")
        return ".".join(part for part in (*(m.strip("_") for m in modules), found["name"]) if part)
    if node.op == "placeholder":
        return re.sub(r"^[lL]_+|_+$", "", node.name) or node.name
    return node.name


_STATE = re.compile(
    r"^l_.*?(?P<modules>modules_.*?_)?(parameters|buffers)_(?P<name>\w+?)_*$", re.IGNORECASE
)


def type_of(node: Node) -> str:
    """Type and shape of a node's value: `f32[5, 8]`; of equal parts, `3 x f32[5, 8]`."""
    return _type(value_of(node))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        short = str(value.dtype).removeprefix("torch.")
        shape = ", ".join(str(size) for size in value.shape)
        return f"{_DTYPES.get(short, short)}[{shape}]"
    if isinstance(value, tuple | list):
        kinds = Counter(map(_type, value))
        return " + ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "()"
    return type(value).__name__ if value is not None else ""


_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
}


def operation(node: Node) -> str:
    """What a node does, by the canonical name of the operation where it has one."""
    op = op_of(node)
    if op is not None:
        return op.name
    return node.target if isinstance(node.target, str) else _function_name(node.target)


def _function_name(target: Callable[..., Any]) -> str:
    return str(getattr(target, "__name__", target))


@dataclass(frozen=True)
class _Line:
    """`key`: equal for lines that say the same of other nodes."""

    name: str
    text: str
    key: str


def _line(node: Node, mark: str) -> _Line:
    if node.op == "placeholder":
        kind = type_of(node)
        return _Line(name_of(node), f"{mark} {name_of(node)}: {kind} = input", f"{mark}{kind}")
    if node.op == "output":
        (returned,) = node.args
        outputs = returned if isinstance(returned, tuple | list) else [returned]
        said = ", ".join(_said(each, name_of) for each in outputs)
        return _Line("", f"{mark} return {said}", "return")
    kind = f": {type_of(node)}" if type_of(node) else ""
    text = f"{mark} {node.name}{kind} = {_call(node, name_of)}"
    key = _call(node, _kind_of)
    if operation(node) in _PLACES:  # which part is taken tells one branch from another
        key = re.sub(r"\b\d+\b", "#", key)
    return _Line(node.name, text, f"{mark}{kind} = {key}")


_PLACES = ("getitem", "narrow", "select")


def _kind_of(node: Node) -> str:
    """What stands for a node where only its kind counts."""
    if is_state(node):
        return re.sub(r"\d+", "#", name_of(node))
    if is_part(node):
        return f"{_kind_of(node.all_input_nodes[0])}[]"
    return f"<{operation(node)}>"


def _call(node: Node, name: Callable[[Node], str]) -> str:
    args = [_said(value, name) for value in node.args]
    if node.target in _INFIX and len(args) == 2 and not node.kwargs:
        return f"{args[0]} {_INFIX[node.target]} {args[1]}"
    if node.target is operator.getitem:
        index = args[1].strip("()").rstrip(",")
        return f"{args[0]}[{index}]"
    said = [*args, *(f"{key}={_said(value, name)}" for key, value in node.kwargs.items())]
    if node.op == "call_method":
        return f"{said[0]}.{node.target}({', '.join(said[1:])})"
    assert callable(node.target)
    return f"{_function_name(node.target)}({', '.join(said)})"


_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.matmul: "@",
    operator.iadd: "+=",
    operator.isub: "-=",
    operator.imul: "*=",
    operator.itruediv: "/=",
}


def _said(value: Any, name: Callable[[Node], str]) -> str:
    if isinstance(value, Node):
        return name(value)
    if isinstance(value, tuple | list):
        parts = [_said(part, name) for part in value]
        inner = ", ".join(_short(parts))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(parts) == 1 else f"({inner})"
    if isinstance(value, slice):
        ends = [value.start, value.stop, value.step]
        return ":".join("" if end is None else _said(end, name) for end in ends).rstrip(":") or ":"
    return "..." if value is Ellipsis else repr(value).removeprefix("torch.")


def _short(parts: Sequence[str]) -> Sequence[str]:
    """At most six entries of a long list."""
    return parts if len(parts) <= 6 else [*parts[:3], f"... {len(parts) - 4} more", parts[-1]]


def _state_lines(graph: Graph) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for node in filter(is_state, graph.nodes):
        key = (re.sub(r"\d+", "#", name_of(node)), type_of(node))
        kinds.setdefault(key, []).append(name_of(node))
    for (pattern, kind), names in kinds.items():
        several = f"{pattern}: {len(names)} x {kind}"
        yield f"  # {several if len(names) > 1 else f'{names[0]}: {kind}'}"


def _collapsed(lines: Sequence[_Line]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        length, repeats = _block(lines, at)
        yield from (line.text for line in lines[at : at + length])
        if repeats > 1:
            first, last = lines[at + length], lines[at + length * repeats - 1]
            these = "this line" if length == 1 else f"these {length} lines"
            names = f"{first.name} to {last.name}" if first.name != last.name else first.name
            yield f"      ... {repeats - 1} more times {these}: {names}"
        at += length * repeats


def _block(lines: Sequence[_Line], at: int) -> tuple[int, int]:
    """Length and number of repeats of the block from `at` on that covers most; (1, 1) if none."""
    best, covered = (1, 1), LEAST_REPEATS - 1
    for length in range(1, min(LONGEST_BLOCK, (len(lines) - at) // LEAST_REPEATS) + 1):
        keys = [line.key for line in lines[at : at + length]]
        repeats = 1
        while [li.key for li in lines[at + repeats * length : at + (repeats + 1) * length]] == keys:
            repeats += 1
        if repeats >= LEAST_REPEATS and length * repeats > covered:
            best, covered = (length, repeats), length * repeats
    return best
