"""Every spelling of an operation must be read as what it computes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from optimus.ops import OPS, arguments, is_canonical, op_of, out_of_place
from optimus.vocabulary import SPELLINGS

X = torch.randn(4, 6)
CUBE = torch.randn(2, 3, 4)
Call = tuple[Callable[..., Any] | str, tuple[Any, ...], dict[str, Any]]

SPELLED: list[tuple[str, Call]] = [
    ("relu", ("relu", (X,), {})),
    ("relu", (F.relu, (X, False), {})),
    ("neg", (operator.neg, (X,), {})),
    ("add", (operator.add, (2, X), {})),
    ("add", (torch.add, (X, X), {"alpha": 3})),
    ("rsub", (operator.sub, (2, X), {})),
    ("clamp", ("clip", (X, -1), {"max": 0.5})),
    ("to", ("to", (X, torch.float64), {})),
    ("to", ("to", (X, "cpu", torch.float64, False, True), {})),
    ("to", ("double", (X,), {})),
    ("to", ("to", (X,), {"dtype": torch.bfloat16})),
    ("contiguous", ("contiguous", (X.t(),), {})),
    ("split", ("split", (X,), {"split_size": 2, "dim": 1})),
    ("split", ("split_with_sizes", (X, [1, 5], -1), {})),
    ("split", ("split_with_sizes", (X,), {"split_sizes": [1, 5], "dim": -1})),
    ("chunk", (torch.chunk, (X, 3), {"dim": 1})),
    ("hsplit", ("hsplit", (X, 2), {})),
    ("reshape", ("view", (X, 3, -1), {})),
    ("reshape", ("view", (X, (3, -1)), {})),
    ("reshape", ("reshape", (X,), {"shape": (3, 8)})),
    ("permute", ("permute", (CUBE, 2, 0, 1), {})),
    ("transpose", ("swapdims", (CUBE, 0, -1), {})),
    ("transpose", ("swapaxes", (CUBE,), {"axis0": 0, "axis1": 1})),
    ("movedim", ("moveaxis", (CUBE, 0, 2), {})),
    ("ravel", ("ravel", (X,), {})),
    ("expand", ("expand", (X[:1], 4, -1), {})),
    ("unsqueeze", ("unsqueeze", (X, -1), {})),
    ("cat", (torch.concatenate, ([X, X],), {"axis": 1})),
    ("vstack", (torch.row_stack, ([X, X],), {})),
    ("matmul", (operator.matmul, (X, X.t()), {})),
    ("mm", (torch.ops.aten.mm, (X, X.t()), {})),
    ("mm", (torch.ops.aten.mm.default, (X, X.t()), {})),
    ("addmm", (torch.ops.aten.addmm.default, (X[:, 0], X, X.t()), {"beta": 2})),
    ("einsum", (torch.einsum, ("ab,cb->ac", X, X), {})),
    ("softmax", ("softmax", (X, -1), {})),
    ("softmax", (torch.softmax, (X, 1, torch.float64), {})),
    ("log_softmax", (F.log_softmax, (X,), {"dim": 1, "dtype": torch.float64})),
    ("sum", (torch.sum, (X,), {"axis": 1, "keepdims": True})),
    ("amax", ("amax", (X, 1), {})),
    ("dropout", (torch.dropout, (X, 0.5), {"train": False})),
    ("dropout", (F.dropout, (X, 0.5, False, False), {})),
]


def spelling(target: Callable[..., Any] | str) -> str:
    """The same in every process, as workers that share the tests must name them alike."""
    return target if isinstance(target, str) else f"{target.__module__}.{target.__name__}"


def run(target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, or the method of that name."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def node_of(call: Call) -> tuple[Node, dict[Node, torch.Tensor]]:
    """A graph's node for the call, and the tensors that its inputs stand for."""
    target, args, kwargs = call
    graph, held = Graph(), dict[Node, torch.Tensor]()

    def hold(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        held[node] = value
        return node

    args, kwargs = torch.utils._pytree.tree_map(hold, (args, kwargs))
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return make(target, args, kwargs), held


SPELLED_IDS = [f"{name}-{spelling(call[0])}" for name, call in SPELLED]


@pytest.mark.parametrize(("name", "call"), SPELLED, ids=SPELLED_IDS)
def test_spelling(name: str, call: Call) -> None:
    node, held = node_of(call)
    op, values = op_of(node), arguments(node)
    assert op is not None and op.name == name and values is not None
    args, kwargs = torch.fx.map_arg(op.build(values), held.__getitem__)
    torch.testing.assert_close(op.target(*args, **kwargs), run(*call), rtol=0, atol=0)
    rebuilt, _ = node_of((op.target, args, kwargs))
    assert is_canonical(rebuilt)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "one dimension": lambda x: x.flatten(),
    "one dimension, strided": lambda x: x.flatten().repeat_interleave(2)[::2],
    "a number": lambda x: x.flatten()[0],
}


def relations(call: Call) -> list[Any]:
    """Of each result: whether it is an input, whether it lies in one's memory, and how it lies."""
    inputs = [x for x in torch.utils._pytree.tree_leaves(call[1:]) if isinstance(x, torch.Tensor)]
    held = {x.untyped_storage().data_ptr() for x in inputs}
    return [
        (any(r is x for x in inputs), r.untyped_storage().data_ptr() in held, r.shape, r.stride())
        for r in torch.utils._pytree.tree_leaves(run(*call))
        if isinstance(r, torch.Tensor)
    ]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("name", "call"), SPELLED, ids=SPELLED_IDS)
def test_spelling_gives_the_same_memory(
    name: str, call: Call, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Also where an input is laid out otherwise than in a plain example."""
    target, args, kwargs = call
    args = tuple(layout(a) if isinstance(a, torch.Tensor) else a for a in args)
    try:
        expected = relations((target, args, kwargs))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return  # the call is not for inputs of these dimensions
    node, held = node_of((target, args, kwargs))
    op, values = op_of(node), arguments(node)
    assert op is not None and values is not None
    given, named = torch.fx.map_arg(op.build(values), held.__getitem__)
    assert relations((op.target, given, named)) == expected


UNREADABLE: list[Call] = [
    ("view", (X, torch.int32), {}),
    ("to", (X, CUBE), {}),
    (F.relu, (X,), {"inplace": True}),
    (torch.add, (X, X), {"out": X}),
    (operator.truediv, (2, X), {}),
    (torch.narrow, (X, 0, 1), {}),
    (torch.narrow, (X, 0, 1, 1, 1), {}),
    (torch.relu, (X,), {"unknown": 1}),
]


@pytest.mark.parametrize("call", UNREADABLE, ids=[spelling(call[0]) for call in UNREADABLE])
def test_what_the_canonical_form_cannot_say(call: Call) -> None:
    node, _ = node_of(call)
    assert arguments(node) is None
    assert not is_canonical(node)


def test_in_place_forms() -> None:
    for call in (("add_", (X, 1), {}), (operator.iadd, (X, 1), {}), (F.relu, (X, True), {})):
        node, _ = node_of(call)
        form = out_of_place(node)
        assert form is not None and form[1]["input"] is node.args[0]
    assert out_of_place(node_of((torch.relu, (X,), {}))[0]) is None


def test_every_spelling_names_the_parameters_of_its_operation() -> None:
    for op in OPS.values():
        assert SPELLINGS[op.target].op is op
    for target, spelling in SPELLINGS.items():
        extra = {p.name for p in spelling.slots} - set(spelling.op.parameters)
        assert extra <= {"inplace", "out", "_stacklevel", "target"}, target
