"""Running statistics of merged batch norms, and their counters, are stored and updated as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimus.backend import OptimusBackend
from optimus.joins import read_join
from optimus.legality import Legality
from optimus.packing import Packing
from optimus.packs import Pack
from optimus.updates import counters_of, is_buffer, is_written_back
from tests.optimus.capture import Captured, names


class Norms(nn.Module):
    """Three batch norms of unequal widths on pieces of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.widths = [2, 3, 4]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in self.widths)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.widths, 1)
        return torch.cat([norm(p) for norm, p in zip(self.norms, parts, strict=True)], 1)


def _pair() -> tuple[Norms, Norms, Packing, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Norms().double()
    packing = Packing()
    backend = OptimusBackend(inner="aot_eager", packing=packing, verify=False, strict=True)
    return model, copy.deepcopy(model), packing, torch.compile(model, backend=backend)


def _input(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 9, generator=generator, dtype=torch.float64)


def _assert_same(model: nn.Module, twin: nn.Module) -> None:
    assert list(model.state_dict()) == list(twin.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])


def _buffer_packs(packing: Packing) -> list[Pack]:
    return [pack for pack in packing.packs if pack.holds_buffers]


def test_statistics_are_updated_where_they_lie() -> None:
    model, twin, packing, compiled = _pair()
    buffers = dict(model.named_buffers())
    for seed in range(3):
        torch.testing.assert_close(compiled(_input(seed)), twin(_input(seed)))
    assert sorted(tuple(p.whole.shape) for p in _buffer_packs(packing)) == [(3,), (9,), (9,)]
    assert all(p.is_intact() for p in packing.packs)
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    _assert_same(model, twin)
    model.eval()
    twin.eval()
    torch.testing.assert_close(compiled(_input(4)), twin(_input(4)))
    assert len(_buffer_packs(packing)) == 3
    packing.dissolve()
    _assert_same(model, twin)
    assert all(b.untyped_storage().nbytes() == b.nbytes for b in model.buffers())


def test_state_loads_and_copies_stand_alone() -> None:
    model, twin, packing, compiled = _pair()
    compiled(_input(0))
    twin.load_state_dict(model.state_dict())
    changed = {name: value + 1 for name, value in twin.state_dict().items()}
    model.load_state_dict(changed)
    twin.load_state_dict(changed)
    other = copy.deepcopy(model)
    other(_input(1))
    torch.testing.assert_close(compiled(_input(2)), twin(_input(2)))
    _assert_same(model, twin)
    assert all(p.is_intact() for p in packing.packs)
    for norms in (model.norms, twin.norms):
        norms[1].reset_running_stats()
    torch.testing.assert_close(compiled(_input(3)), twin(_input(3)))
    _assert_same(model, twin)


@pytest.mark.parametrize("how", ["to", "assign", "data"])
def test_other_buffers_in_their_place_count(how: str) -> None:
    """`module.to()` and `load_state_dict(assign=True)` put new tensors into a module."""
    model, twin, _, compiled = _pair()
    compiled(_input(0))
    twin(_input(0))
    for module in (model, twin):
        if how == "to":
            module.float().double()
        elif how == "assign":
            changed = {n: value + 1 for n, value in module.state_dict().items()}
            module.load_state_dict(changed, assign=True)
        else:
            module.norms[0].running_mean.data = torch.ones(2, dtype=torch.float64)
    for seed in (1, 2):
        torch.testing.assert_close(compiled(_input(seed)), twin(_input(seed)))
    _assert_same(model, twin)


def test_buffers_that_cannot_be_moved_are_written_to() -> None:
    """Views of a tensor of the user's stay views of it, and are updated."""
    model, twin, _, compiled = _pair()
    compiled(_input(0))
    twin(_input(0))
    whole = torch.zeros(9, dtype=torch.float64)
    for norm, part in zip(model.norms, whole.split(model.widths), strict=True):
        norm.running_mean = part
    for norm in twin.norms:
        norm.running_mean = torch.zeros_like(norm.running_mean)
    torch.testing.assert_close(compiled(_input(1)), twin(_input(1)))
    _assert_same(model, twin)
    torch.testing.assert_close(whole, torch.cat([norm.running_mean for norm in twin.norms]))


class Buffers(nn.Module):
    """Two buffers that the graph joins."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(2))
        self.register_buffer("two", torch.ones(3))


def _is_join_taken(forward: Any) -> bool:
    module = Buffers()
    type(module).forward = forward
    captured = Captured(module, (torch.randn(5),))
    graph = captured.module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    given = dict(zip(placeholders, captured.inputs, strict=True))
    node = next(n for n in graph.nodes if n.target is torch.cat)
    join = read_join(node, lambda n: is_buffer(n, given))
    return join is not None and is_written_back(join, Legality(graph))


def test_what_is_not_written_back_as_a_whole_stays() -> None:
    def all_back(self: Any, x: Tensor) -> Tensor:
        whole = torch.cat([self.one, self.two])
        whole.mul_(2)
        self.one.copy_(whole.narrow(0, 0, 2))
        self.two.copy_(whole.narrow(0, 2, 3))
        return whole + x

    def only_read(self: Any, x: Tensor) -> Tensor:
        return torch.cat([self.one, self.two]) + x

    def one_back(self: Any, x: Tensor) -> Tensor:
        whole = torch.cat([self.one, self.two])
        whole.mul_(2)
        self.one.copy_(whole.narrow(0, 0, 2))
        return whole + x

    def not_at_all(self: Any, x: Tensor) -> Tensor:
        whole = torch.cat([self.one, self.two])
        whole.mul_(2)
        return whole + x

    def other_places(self: Any, x: Tensor) -> Tensor:
        whole = torch.cat([self.one, self.two])
        whole.mul_(2)
        self.one.copy_(whole.narrow(0, 1, 2))
        self.two.copy_(whole.narrow(0, 2, 3))
        return whole + x

    def too_early(self: Any, x: Tensor) -> Tensor:
        whole = torch.cat([self.one, self.two])
        self.one.copy_(whole.narrow(0, 0, 2))
        self.two.copy_(whole.narrow(0, 2, 3))
        whole.mul_(2)
        return whole + x

    def read_in_between(self: Any, x: Tensor) -> Tensor:
        whole = torch.cat([self.one, self.two])
        whole.mul_(2)
        x = x + self.two.sum()
        self.one.copy_(whole.narrow(0, 0, 2))
        self.two.copy_(whole.narrow(0, 2, 3))
        return whole + x

    def written_itself(self: Any, x: Tensor) -> Tensor:
        whole = torch.cat([self.one, self.two])
        self.one.add_(1)
        return whole + x

    programs = (one_back, not_at_all, other_places, too_early, read_in_between, written_itself)
    assert [_is_join_taken(p) for p in (all_back, only_read)] == [True, True]
    assert not any(map(_is_join_taken, programs))


class Counting(nn.Module):
    """Counters of two kinds, one that is read, and one alone."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c", "d", "read", "vector"):
            self.register_buffer(name, torch.tensor([0] if name == "vector" else 0))

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(1)
        self.b += 1
        self.c.add_(1)
        self.d.add_(2)
        self.read.add_(1)
        self.vector.add_(1)
        return x + self.read


def test_counters() -> None:
    torch._dynamo.reset()
    packing = Packing()
    captured = Captured(Counting(), (torch.randn(2),))
    placeholders = [n for n in captured.module.graph.nodes if n.op == "placeholder"]
    given = dict(zip(placeholders, captured.inputs, strict=True))
    (counters,) = counters_of(captured.module.graph, given)
    assert [n.name.rstrip("_")[-1] for n in counters.members] == ["a", "c"]
    before = len(names(captured.module))
    module, inputs, _ = packing.pack_graph(captured.module, captured.inputs)
    assert before - len(names(module)) == len(captured.inputs) - len(inputs) == 1
    torch._dynamo.reset()
    model, twin = Counting(), Counting()
    backend = OptimusBackend(inner="aot_eager", packing=packing, verify=False, strict=True)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        x = torch.randn(2)
        torch.testing.assert_close(compiled(x), twin(x))
    _assert_same(model, twin)
