"""What the evaluator says of a call is what PyTorch's fake mode says of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from optimus.evaluation import Evaluator
from optimus.legality import Context, storages_of, value_of
from optimus.values import Unknown, evaluate, same_strides, same_type

MODE = FakeTensorMode(static_shapes=True)
TRAIN, NO_GRAD = Context(True), Context(False)
AUTOCAST = Context(True, (("cpu", torch.bfloat16, True, None),))
INDEX = (slice(None), slice(1, 3))


def inputs() -> dict[str, Node]:
    """Fake tensors of several kinds as nodes; `x` and `y` are pieces of one tensor, no two alike in
    where they begin."""
    graph, nodes = Graph(), dict[str, Node]()
    with MODE:
        whole = torch.empty(4, 20)
        values = {
            "x": whole[:, 2:8],
            "y": whole[:, 9:15],
            "z": whole.to(torch.float64)[:, :6],
            "w": torch.nn.Parameter(torch.empty(5, 6)),
            "b": torch.nn.Parameter(torch.empty(5)),
            "t": torch.empty(6, 4).t(),
            "i": torch.zeros(4, 6, dtype=torch.int64),
            "empty": torch.empty(0, 6),
            "image": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        }
        values["h"] = F.linear(values["x"], values["w"])
    for name, value in values.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["example_value"] = value
    return nodes


Call = tuple[Callable[..., Any] | str, tuple[Any, ...], dict[str, Any]]

CALLS: list[Call] = [
    (F.linear, ("x", "w", "b"), {}),
    (F.linear, ("t", "w"), {}),
    (torch.matmul, ("x", "y"), {}),  # fails
    (torch.add, ("x", "i"), {}),
    (torch.add, ("z", "y"), {}),
    (torch.mul, ("x", 2.0), {}),
    (torch.mul, ("i", 2), {}),
    (torch.mul, ("i", 2.0), {}),
    (torch.relu, ("t",), {}),
    (torch.stack, (["x", "y"],), {}),
    (torch.stack, (["x", "y", "x"], 1), {}),
    (torch.stack, (["t", "t"], -1), {}),
    (torch.stack, (["h", "h"], 2), {}),
    (torch.stack, (["x", "t"], 4), {}),  # fails
    (torch.stack, (["x", "y"], 4), {}),  # fails
    (torch.cat, (["w", "w"],), {}),
    (torch.cat, (["t", "t"], 1), {}),
    (torch.cat, (["b", "b"],), {}),
    (torch.cat, (["z", "z"], 1), {}),
    (torch.cat, (["empty", "empty"],), {}),
    (torch.cat, (["image", "image"], 1), {}),
    (torch.stack, (["image", "image"], 1), {}),
    (torch.hstack, (["x", "y"],), {}),
    (torch.vstack, (["b", "b"],), {}),
    (torch.dstack, (["x", "y"],), {}),
    (torch.column_stack, (["b", "b"],), {}),
    (torch.cat, (["x", "t", "i"], 1), {}),
    (F.layer_norm, ("x", (6,)), {}),
    (F.dropout, ("x", 0.5, False), {}),
    (torch.sum, ("x", 1), {"keepdim": True}),
    (torch.softmax, ("h", -1), {"dtype": torch.float64}),
    (torch.narrow, ("h", 1, 1, 3), {}),
    (torch.narrow, ("w", 0, 1, 3), {}),
    (torch.narrow, ("x", 1, 5, 3), {}),  # fails
    (torch.split, ("w", [2, 3], 0), {}),
    (torch.unbind, ("x", 1), {}),
    (torch.unbind, ("empty",), {}),
    (torch.reshape, ("x", (2, 12)), {}),
    (torch.reshape, ("x", (4, 2, 3)), {}),
    (torch.reshape, ("x", (-1, 0)), {}),  # fails
    (torch.permute, ("w", (1, 0)), {}),
    (torch.unsqueeze, ("y", 1), {}),
    (torch.detach, ("h",), {}),
    (operator.getitem, ("h", INDEX), {}),
    (operator.getitem, ("y", (..., 1)), {}),
    ("view", ("x", 4, 6), {}),
    ("view", ("x", torch.int32), {}),
    ("contiguous", ("x",), {}),
    ("contiguous", ("w",), {}),
    ("expand", ("y", 3, 4, 6), {}),
    ("to", ("x", torch.bfloat16), {}),
    ("to", ("x", torch.float32), {}),
]


def place_in(value: Any, sources: list[torch.Tensor]) -> Any:
    """Where a value lies: whose memory it shares and where it begins there."""
    if isinstance(value, tuple | list):
        return [place_in(part, sources) for part in value]
    assert isinstance(value, FakeTensor) and value.fake_mode is MODE
    shared = [bool(storages_of(value) & storages_of(source)) for source in sources]
    return shared, value.storage_offset(), [value is source for source in sources]


def resolved(value: Any, named: dict[str, Node]) -> Any:
    """`value` with nodes in the place of their names."""
    if isinstance(value, tuple | list):
        return type(value)(resolved(part, named) for part in value)
    return named.get(value, value) if isinstance(value, str) else value


def outcome(compute: Callable[..., Any], *args: Any) -> Any:
    """The value, or None where it cannot be told."""
    try:
        return compute(*args)
    except Unknown:
        return None


@pytest.mark.parametrize(
    "context", [TRAIN, NO_GRAD, AUTOCAST], ids=["train", "no_grad", "autocast"]
)
def test_is_what_the_fake_mode_says(context: Context) -> None:
    """Type, layout and place in memory, for calls alike that were and were not made before; twice,
    with the inputs elsewhere in memory the second time."""
    evaluator = Evaluator(MODE)
    for _ in range(2):
        nodes = inputs()
        for x, y in (("x", "y"), ("y", "x")):
            named = nodes | {"x": nodes[x], "y": nodes[y]}
            sources = [value_of(node) for node in nodes.values()]
            for target, names, kwargs in CALLS:
                args = resolved(names, named)
                expected = outcome(evaluate, MODE, context, target, args, kwargs)
                value = outcome(evaluator, context, target, args, kwargs)
                said = f"{target} of {names}"
                assert (value is None) == (expected is None), said
                if expected is not None:
                    assert type(value) is type(expected), said
                    assert same_type(value, expected) and same_strides(value, expected), said
                    assert place_in(value, sources) == place_in(expected, sources), said


def test_each_result_has_its_own_memory() -> None:
    """Also where the second of two calls alike was not computed again."""
    evaluator, nodes = Evaluator(MODE), inputs()
    one, other = (evaluator(TRAIN, torch.relu, (nodes[name],), {}) for name in "xy")
    assert not storages_of(one) & storages_of(other)


def test_dynamic_sizes_stay_dynamic() -> None:
    """A call on a dynamic size is not answered from one on a number, nor the other way round."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    evaluator, graph = Evaluator(mode), Graph()
    dynamic, static = graph.placeholder("dynamic"), graph.placeholder("static")
    real = torch.randn(7, 6)
    dynamic.meta["example_value"] = mode.from_tensor(real, static_shapes=False)
    static.meta["example_value"] = mode.from_tensor(torch.randn(7, 6), static_shapes=True)
    for target in (torch.relu, torch.t):
        for node in (static, dynamic, static):
            value = evaluator(TRAIN, target, (node,), {})
            assert value._has_symbolic_sizes_strides is (node is dynamic)
