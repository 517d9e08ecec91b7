"""Packing changes where parameters lie and nothing else."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from optimus.backend import OptimusBackend
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing


class Towers(nn.Module):
    """Four towers on pieces of one input: their weights and biases become two packs."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, 4, 1)
        return torch.cat([tower(p) for tower, p in zip(self.towers, parts, strict=True)], 1)


def _pair() -> tuple[Towers, Towers, Packing, Any]:
    """A model, its twin that stays plain, the packing and the compiled model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Towers().double()
    twin = copy.deepcopy(model)
    packing = Packing()
    backend = OptimusBackend(inner="aot_eager", packing=packing, verify=False, strict=True)
    return model, twin, packing, torch.compile(model, backend=backend)


def _input(rows: int = 5, generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.randn(rows, 16, generator=generator, dtype=torch.float64)


def _train(run: Any, model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    losses: list[float] = []
    for _ in range(steps):
        loss = run(_input(generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_is_the_same_and_the_weights_are_one_tensor() -> None:
    model, twin, packing, compiled = _pair()
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    assert _train(compiled, model) == pytest.approx(_train(twin, twin), rel=1e-9)
    assert sorted(p.whole.shape for p in packing.packs) == [(4, 3), (4, 3, 4)]
    assert all(p.is_intact() for p in packing.packs)
    assert list(model.state_dict()) == names
    assert all(parameters[n] is p for n, p in model.named_parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])


def test_gradients_are_views_of_one_tensor() -> None:
    model, twin, _, compiled = _pair()
    x = _input()
    compiled(x).square().sum().backward()
    twin(x).square().sum().backward()
    grads = [tower.weight.grad for tower in model.towers]
    assert len({g.untyped_storage().data_ptr() for g in grads if g is not None}) == 1
    for own, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(own.grad, plain.grad)


def test_gradients_accumulate() -> None:
    model, twin, _, compiled = _pair()
    x = _input()
    for run in (compiled, twin):
        for scale in (1.0, 2.0):
            (run(x) * scale).square().sum().backward()
    for own, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(own.grad, plain.grad)


def test_state_loads_in_both_directions() -> None:
    model, twin, packing, compiled = _pair()
    x = _input()
    compiled(x)
    twin.load_state_dict(model.state_dict())
    changed = {name: value + 1 for name, value in twin.state_dict().items()}
    model.load_state_dict(changed)
    twin.load_state_dict(changed)
    assert all(p.is_intact() for p in packing.packs)
    torch.testing.assert_close(compiled(x), twin(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_independent(how: str) -> None:
    model, _, _, compiled = _pair()
    x = _input()
    before = compiled(x)
    if how == "torch.save":
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        other = Towers().double()
        other.load_state_dict(torch.load(buffer))
    else:
        other = copy.deepcopy(model) if how == "deepcopy" else _pickled(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    torch.testing.assert_close(compiled(x), before)


def _pickled(model: Towers) -> Towers:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_parameters_moved_away_are_moved_back() -> None:
    model, twin, packing, compiled = _pair()
    x = _input()
    compiled(x)
    for m in (model, twin):
        m.float().double()
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.mul_(2)
    assert not any(p.is_intact() for p in packing.packs)
    torch.testing.assert_close(compiled(x), twin(x))
    assert all(p.is_intact() for p in packing.packs)


def test_later_graphs_reuse_the_packs() -> None:
    _, twin, packing, compiled = _pair()
    compiled(_input())
    packs = list(packing.packs)
    with torch.no_grad():
        x = _input(7)
        torch.testing.assert_close(compiled(x), twin(x))
    assert packing.packs == packs


@pytest.mark.parametrize("grad", [True, False])
def test_modules_that_share_a_graph_keep_their_own_weights(grad: bool) -> None:
    """Dynamo compiles the code of a class once for all its modules."""
    torch._dynamo.reset()
    models = [Towers().double() for _ in range(3)]
    twins, packing = copy.deepcopy(models), Packing()
    backend = OptimusBackend(inner="aot_eager", packing=packing, verify=False, strict=True)
    compiled = [torch.compile(model, backend=backend) for model in models]
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            x = _input()
            for run, twin in zip(compiled, twins, strict=True):
                torch.testing.assert_close(run(x), twin(x))
                for loss in (run(x).square().sum(), twin(x).square().sum()) if grad else ():
                    loss.backward()
    for model, twin in zip(models, twins, strict=True):
        for own, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, plain.grad)
    assert len(backend.report.graphs) == 1
    assert len(packing.packs) == 6
    assert all(p.is_intact() for p in packing.packs)


def test_parameters_that_were_replaced_count() -> None:
    model, _, _, compiled = _pair()
    x = _input()
    compiled(x)
    model.towers[1].weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    plain = copy.deepcopy(model)
    for run in (compiled, plain):
        run(x).square().sum().backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    for module in (model, plain):
        module.load_state_dict(state, assign=True)
    torch.testing.assert_close(compiled(x), plain(x))


def test_dissolving_gives_everyone_memory_of_its_own() -> None:
    model, twin, packing, compiled = _pair()
    compiled(_input())
    packing.dissolve()
    assert not packing.packs
    for own, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, plain)
        assert own.untyped_storage().nbytes() == own.numel() * own.element_size()


class Nested(nn.Module):
    """Two tensors of two weights each, stacked, one of the two used alone as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(n, 4) for n in (2, 3, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = [torch.cat([self.weights[i], self.weights[i + 1]]) for i in (0, 2)]
        return torch.bmm(torch.stack(pairs), x.view(1, 4, 4).expand(2, 4, 4)) + pairs[1]


def test_joins_of_joins() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Nested().double()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin)]
    packer = PackedOptimizer(optimizers[:1])
    packing = Packing(adopt=packer.adopt)
    backend = OptimusBackend("none", inner="aot_eager", packing=packing, strict=True)
    compiled = torch.compile(model, backend=backend)
    for seed in range(3):
        x = _input(1, torch.Generator().manual_seed(seed))
        for run, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()
    (pack,) = packing.packs
    assert tuple(pack.whole.shape) == (2, 5, 4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    one, other = (o.state_dict()["state"] for o in optimizers)
    for number in one:
        torch.testing.assert_close(one[number], other[number])
    packer.release()
    packing.dissolve()
    torch.testing.assert_close(model(x), twin(x))


class Tied(Towers):
    """The second tower is the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.towers[1].weight = self.towers[0].weight


class Frozen(Towers):
    """One weight takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.towers[2].weight.requires_grad_(False)


class Returned(Towers):
    """The stack of weights itself is returned: it must not be the weights' own memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower.weight for tower in self.towers])


@pytest.mark.parametrize("kind", [Tied, Frozen, Returned])
def test_what_must_not_be_packed_is_not(kind: type[Towers]) -> None:
    torch._dynamo.reset()
    model = kind().double()
    packing = Packing()
    backend = OptimusBackend(inner="aot_eager", packing=packing, verify=False, strict=True)
    x = _input()
    out = torch.compile(model, backend=backend)(x)
    torch.testing.assert_close(out, model(x))
    packed = {id(p) for pack in packing.packs for p in pack.parameters}
    kept = {Tied: (), Frozen: (2,), Returned: range(4)}[kind]
    assert not {id(model.towers[i].weight) for i in kept} & packed
    torch.testing.assert_close(out, model(x))


class Elsewhere(nn.Module):
    """A stack that would be another one, or have another gradient, where the graph begins."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4) for _ in range(3))
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.where in ("plain", "with_grad")):
            if self.where == "after_a_write":
                self.weights[0].add_(1)
            whole = torch.stack(list(self.weights))
            if self.where == "before_a_write":
                self.weights[0].add_(1)
        return whole * x + self.weights[1]


@pytest.mark.parametrize(
    "where", ["plain", "no_grad", "with_grad", "before_a_write", "after_a_write"]
)
def test_a_stack_stays_where_its_place_matters(where: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, packing = Elsewhere(where).double(), Packing()
    twin = copy.deepcopy(model)
    backend = OptimusBackend("none", inner="aot_eager", packing=packing, strict=True)
    compiled = torch.compile(model, backend=backend)
    with torch.set_grad_enabled(where in ("plain", "no_grad")):
        for _ in range(2):
            x = torch.randn(3, 4, dtype=torch.float64)
            outs = compiled(x), twin(x)
            torch.testing.assert_close(*outs)
            for out in outs if outs[1].requires_grad else ():
                out.sum().backward()
    for own, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, plain)
        torch.testing.assert_close(own.grad, plain.grad)
    assert len(packing.packs) == (where == "plain")
