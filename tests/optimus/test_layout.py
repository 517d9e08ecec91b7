"""Strides and sharing of memory that a caller or a consumer could notice after a rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import name_of
from optimus.pattern import Match, Pattern
from tests.optimus.capture import names, rewritten
from tests.optimus.handmade import batch_pointwise, local, merge_equal
from tests.optimus.patterns.rewriting import rewrite

X = torch.arange(12.0).reshape(3, 4) - 2
Outputs = Tensor | tuple[Tensor, ...]


@torch.library.custom_op("optimus_tests::in_memory_order", mutates_args=())
def in_memory_order(x: Tensor) -> Tensor:
    """All elements of a dense tensor as they lie in memory."""
    return x.as_strided((x.numel(),), (1,)).clone()


@in_memory_order.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())


@torch.library.custom_op("optimus_tests::in_gaps", mutates_args=())
def in_gaps(x: Tensor) -> Tensor:
    """A number that depends on how far apart columns lie."""
    return x.sum() * x.stride(1)


@in_gaps.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


def transposed_relu() -> Pattern:
    """relu(x) with its result laid out the other way round."""

    def rewrite(match: Match, edit: Editor) -> None:
        flipped = edit.call("transpose", match.anchor.args[0], 0, 1)
        copied = edit.call(torch.clone, flipped, memory_format=torch.contiguous_format)
        out = edit.call("relu", edit.call("transpose", copied, 0, 1))
        edit.replace(match.anchor, out)

    return local("relu", _first, rewrite)


def _first(node: Node) -> Match | None:
    """Not again what the rewrite itself has made."""
    source = node.args[0]
    is_new = isinstance(source, Node) and source.target is torch.transpose
    return None if is_new else Match((node,))


def view(x: Tensor) -> Tensor:
    return torch.relu(x).view(2, 6) + 1


def flat_view(x: Tensor) -> Tensor:
    return torch.relu(x).view(-1) + 1


def custom_op(x: Tensor) -> Tensor:
    return in_memory_order(torch.relu(x))


def custom_op_later(x: Tensor) -> Tensor:
    return in_memory_order(torch.tanh(torch.relu(x)) * 2)


def as_strided(x: Tensor) -> Tensor:
    return torch.relu(x).as_strided((4, 3), (3, 1)) * 2


def as_strided_method_on_view(x: Tensor) -> Tensor:
    return torch.relu(x)[1:].as_strided((2, 2), (2, 1)) * 2


def as_strided_at_offset(x: Tensor) -> Tensor:
    return torch.relu(x).as_strided((2, 2), (2, 1), 1) * 2


def as_strided_twice(x: Tensor) -> Outputs:
    y = torch.relu(x)
    return y.as_strided((2, 2), (2, 1), 1), y.as_strided((2, 2), (2, 1), 2)


def views_twice(x: Tensor) -> Outputs:
    y = torch.relu(x)
    return y.view(-1), y.view(-1)


def expanded(x: Tensor) -> Outputs:
    y = torch.relu(x)
    return y.unsqueeze(1).expand(-1, 3, -1), y[:, :1].expand(-1, 4) + 1


def with_gaps(x: Tensor) -> Outputs:
    return torch.relu(x)[:, :2], in_gaps(torch.relu(x)[:, ::2])


def returned_twice(x: Tensor) -> Outputs:
    y = torch.relu(x)
    return y, x.tanh(), y


def as_strided_function(x: Tensor) -> Tensor:
    return torch.as_strided(torch.relu(x), (6,), (2,)) * 2


def returned(x: Tensor) -> Outputs:
    return torch.relu(x)


def returned_later(x: Tensor) -> Outputs:
    return torch.relu(x).tanh()


def returned_view(x: Tensor) -> Outputs:
    y = torch.relu(x)
    return y.t(), y[1:] + 1


def two_views(x: Tensor) -> Outputs:
    y = torch.relu(x)
    return y[:2].tanh(), torch.cat([y, y]).view(2, 12)


def masked(x: Tensor) -> Outputs:
    y = torch.relu(x)
    return torch.where(y > 1, y, -y), y.masked_fill(y == 0, 3.0)


def written_later(x: Tensor) -> Outputs:
    y = torch.relu(x).tanh()
    z = y + 1
    y[:, 0] = 5
    return y, z


def written_view(x: Tensor) -> Outputs:
    y = torch.relu(x).reshape(2, 6)
    y[0] += 1
    return y.sum(), y


def matmul(x: Tensor) -> Outputs:
    y = torch.relu(x)
    return y @ y.t(), y.flatten(), y.mean(0)


PROGRAMS = [
    view, flat_view, custom_op, custom_op_later, as_strided, as_strided_method_on_view,
    as_strided_at_offset, as_strided_function, as_strided_twice, views_twice, returned_twice,
    expanded, with_gaps,
    returned, returned_later, returned_view, two_views, masked,
    written_later, written_view, matmul,
]  # fmt: skip


KEPT = [as_strided_twice, views_twice, written_view, with_gaps]
"""Programs in which the result of relu must stay what it is."""


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_strided_result(program: Callable[[Tensor], Any], dynamic: bool) -> None:
    if dynamic and program.__name__ in (
        "view",
        "as_strided",
        "as_strided_at_offset",
        "as_strided_twice",
        "as_strided_method_on_view",
    ):
        pytest.skip("has a fixed size")
    module, _ = rewritten(program, (X,), transposed_relu(), dynamic=dynamic)
    assert ("transpose" in names(module)) is (program not in KEPT)


@pytest.mark.parametrize("program", PROGRAMS)
def test_strided_result_of_strided_input(program: Callable[[Tensor], Any]) -> None:
    if program in (view, flat_view, views_twice):
        pytest.skip("is refused by eager")
    rewritten(program, (X.t().contiguous().t(),), transposed_relu())


@pytest.mark.parametrize("program", PROGRAMS)
def test_part_of_a_stack(program: Callable[[Tensor], Any]) -> None:
    """The value becomes a view of a larger one, at an offset."""

    def twice(x: Tensor) -> tuple[Any, Any, Any]:
        return program(x), program(x + 1), program(2 * x)

    rewritten(twice, (X,), batch_pointwise("relu", "tanh", "add"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_of_one(program: Callable[[Tensor], Any]) -> None:
    def twice(x: Tensor) -> tuple[Any, Any]:
        return program(x), program(x)

    rewritten(twice, (X,), merge_equal("relu"), merge_equal("tanh"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_batch_norm_of_a_half_type_on_a_cpu_gets_rows_that_lie_together(dtype: torch.dtype) -> None:
    """On rows of a wider tensor its gradient was six times as far from float64."""

    def program(x: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        parts = F.linear(x, one), F.linear(x, other)
        return tuple(F.batch_norm(p, None, None, training=True) for p in parts)

    inputs = [torch.randn(4, 8, dtype=dtype) for _ in range(3)]
    result = rewrite("widen_shared_input_linears", program, inputs)
    assert result.fired == 1
    norms = [n for n in result.module.graph.nodes if name_of(n) == "batch_norm"]
    together = [tensor_of(n.all_input_nodes[0]).is_contiguous() for n in norms]  # type: ignore[union-attr]
    assert together == [dtype != torch.float32] * 2
