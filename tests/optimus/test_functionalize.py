"""In-place calls become calls that return, where nobody could tell; else they stay."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.backend import copy_graph_module
from optimus.effects import effects_of
from optimus.functionalize import functionalize
from optimus.legality import Legality
from optimus.values import fake_mode_of
from tests.optimus.capture import Captured, rewritten


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator, requires_grad=True) for _ in range(2)]


def iadd(x: Tensor, y: Tensor) -> Any:
    z = x * 2
    z += y
    return z


def chain(x: Tensor, y: Tensor) -> Any:
    z = x @ y.t()
    return z.add_(1).mul_(2).neg_().sub_(3)


def activations(x: Tensor, y: Tensor) -> Any:
    a = F.relu(x + y, inplace=True)
    b = F.leaky_relu(a * 2, 0.2, True)
    return (
        F.elu(b + 1, 0.5, inplace=True),
        F.silu(a + 1, inplace=True),
        F.hardtanh(b + 2, 0, 1, True),
    )


def operators(x: Tensor, y: Tensor) -> Any:
    z = x + 0
    z -= y
    z *= 2
    z /= 3
    z **= 2
    return z


def alpha(x: Tensor, y: Tensor) -> Any:
    z = x + 0
    z.add_(y, alpha=3).sub_(y, alpha=0.5)
    return z


def returned_twice(x: Tensor, y: Tensor) -> Any:
    z = x + y
    w = z.add_(1)
    return z, w


def views_after(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z.mul_(2)
    return z.view(-1) + 1, z[:, 1:].t() * 2, z


def view_before_not_read_after(x: Tensor, y: Tensor) -> Any:
    z = x + y
    w = z.view(-1) * 3
    z += 1
    return w, z


def inside_no_grad(x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        z = x + y
        z.mul_(2)
    return z * x


def no_gradient_before(x: Tensor, y: Tensor) -> Any:
    z = torch.zeros(3, 4)
    z += x
    return z * 2


def two_memories(x: Tensor, y: Tensor) -> Any:
    a, b = x + 1, y + 1
    a += b
    b += a
    a *= b
    return a, b


def sums(x: Tensor, y: Tensor) -> Any:
    total = x * 0
    for part in y.unbind(1):
        total += part[:, None]
    return total


DONE = [iadd, chain, activations, operators, alpha, returned_twice, views_after,
        view_before_not_read_after,
    inside_no_grad, no_gradient_before, two_memories, sums]  # fmt: skip


@pytest.mark.parametrize("program", DONE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_replaced(program: Callable[..., Any], dynamic: bool) -> None:
    module, reports = rewritten(program, inputs(), dynamic=dynamic)
    record = reports["functionalize_in_place"]
    assert record.fired == record.anchors > 0
    assert not any(effects_of(node).writes for node in module.graph.nodes)


def input_written(x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        x.add_(1)
    return x * y


def input_written_through_a_view(x: Tensor, y: Tensor) -> Any:
    v = x.detach()[0]
    v += 1
    return x * y


def part_written(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z[:, 1:] += 1
    return z


def assigned(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z[0] = 1
    return z


def view_read_after(x: Tensor, y: Tensor) -> Any:
    z = x + y
    w = z.view(-1)
    z += 1
    return w * 2, z


def view_returned(x: Tensor, y: Tensor) -> Any:
    z = x + y
    w = z.t()
    z.mul_(2)
    return w, z


def written_through_a_view(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z.view(-1).add_(1)
    return z


def written_through_detach(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z.detach().mul_(2)
    return z * y


def written_under_no_grad(x: Tensor, y: Tensor) -> Any:
    z = x + y
    with torch.no_grad():
        z.mul_(2)
    return z * y


def other_dtype(x: Tensor, y: Tensor) -> Any:
    z = (x + y).to(torch.bfloat16)
    z += y
    return z


def comparison(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z.gt_(0)
    return z


def filled(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z.fill_(1)
    return z + x


def copied(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z.copy_(y)
    return z + x


def maybe_input(x: Tensor, y: Tensor) -> Any:
    z = x.detach().contiguous()  # is x's memory
    z += 1
    return z, x * y


def shape_changed(x: Tensor, y: Tensor) -> Any:
    z = x + y
    w = z * 1
    z.t_()
    return w, z * 2


def dimension_added(x: Tensor, y: Tensor) -> Any:
    z = x + y
    z.unsqueeze_(0)
    return z * 2


KEPT = [input_written, input_written_through_a_view, part_written, assigned, view_read_after,
        view_returned, written_through_a_view, written_through_detach, written_under_no_grad,
        other_dtype, comparison, filled, copied, maybe_input]  # fmt: skip


@pytest.mark.parametrize("program", KEPT)
def test_kept(program: Callable[..., Any]) -> None:
    _, reports = rewritten(program, inputs())
    assert reports["functionalize_in_place"].fired == 0


@pytest.mark.parametrize("program", [shape_changed, dimension_added])
def test_a_graph_that_turns_a_tensor_in_place_stays_as_it_is(program: Callable[..., Any]) -> None:
    _, reports = rewritten(program, inputs())
    assert not reports


def test_one_memory_replaced_beside_one_kept() -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        a, b = x + 1, y + 1
        a += 1
        b[0] = 2
        b += a
        return a, b

    _, reports = rewritten(program, inputs())
    record = reports["functionalize_in_place"]
    assert (record.anchors, record.fired) == (3, 1)


def test_dropout_in_place_draws_the_same() -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        return F.dropout(x + y, 0.5, True, True) + torch.rand(3, 4)

    rewritten(program, inputs())


def test_many_writes_to_one_memory_take_linear_time() -> None:
    def seconds(count: int) -> float:
        def program(x: Tensor) -> Tensor:
            y = x * 2
            for _ in range(count):
                y += 1
                y[0]
            return y

        module = copy_graph_module(Captured(program, (torch.randn(2),)).module)
        mode = fake_mode_of(module.graph)
        assert mode is not None
        start = time.process_time()
        functionalize(module.graph, mode, Legality(module.graph))
        return time.process_time() - start

    seconds(10)
    assert seconds(200) < 16 * seconds(50) + 0.05
