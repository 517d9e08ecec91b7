"""Members of a pack that begin where vectors are read, as on a GPU: what lies between them is zero.

On a CPU they need not begin there; here they do all the same.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optimus.backend import OptimusBackend
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing
from optimus.packs import Pack, Part, misplaced, padded

ALIGNMENT = 16


class Fields(nn.Module):
    """As MaskNet: fields of five numbers, each with a norm and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(5) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [norm(p) for norm, p in zip(self.norms, x.split(5, 1), strict=True)]
        return torch.cat([f(p) for f, p in zip(self.layers, parts, strict=True)], 1)


class Handmade(nn.Module):
    """Stacks of stacks and what only a stack's own strides allow; one weight is used alone, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(3, 3) for _ in range(4))
        self.gains = nn.ParameterList(torch.randn(5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pairs = [torch.stack([self.weights[i], self.weights[i + 1]]) for i in (0, 2)]
        long = torch.stack(pairs).view(12, 3) + pairs[1].view(1, 18).sum()
        gains = torch.stack(list(self.gains)).view(20)
        return ((x * gains)[:, :3] @ long.t()).tanh() @ long @ self.weights[1]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
}


class Run:
    """A model in training, plain, or compiled and packed."""

    def __init__(
        self,
        packed: bool,
        optimizer: str = "adamw",
        make: Any = Fields,
        *,
        adopt: bool = True,
        dtype: torch.dtype = torch.float64,
        inner: str = "aot_eager",
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.dtype = dtype
        self.model = make().to(dtype)
        self.optimizer: Optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.call: Any = self.model
        self.packer = PackedOptimizer([self.optimizer])
        self.packing = Packing(adopt=self.packer.adopt if adopt else None, alignment=ALIGNMENT)
        if packed:
            backend = OptimusBackend(inner=inner, packing=self.packing, verify=False, strict=True)
            self.call = torch.compile(self.model, backend=backend)

    def step(self, seed: int, call: Any = None, rows: int = 6, clip: float = 0.0) -> float:
        x = torch.randn(rows, 20, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        loss = (call or self.call)(x.to(self.dtype)).float().square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(
                [p for g in self.optimizer.param_groups for p in g["params"]], clip
            )
        self.optimizer.step()
        return loss.item()

    def leaves(self) -> int:
        return len(self.optimizer.param_groups[0]["params"])


def _between(pack: Pack, whole: Tensor) -> Tensor:
    """What of a tensor laid out as the pack is none of its parts."""
    rest = torch.ones_like(whole, dtype=torch.bool)
    for part in pack.parts:
        part.of(rest).fill_(False)
    return whole.detach()[rest]


def _assert_in_order(run: Run, padded_packs: int) -> None:
    """Members lie as they should, and nothing lies between them."""
    assert sum(pack.is_padded for pack in run.packing.packs) == padded_packs
    for pack in run.packing.packs:
        assert pack.is_intact()
        assert pack.whole.is_contiguous()
        assert all(m.is_contiguous() for m in pack.members)
        assert not any(m.data_ptr() % ALIGNMENT for m in pack.members if m.numel() > 1)
        assert not _between(pack, pack.whole).any()  # a NaN would count
        if pack.leaf is not None:
            assert pack.leaf.grad is not None
            assert not _between(pack, pack.leaf.grad).any()
            states = [s for s in run.optimizer.state[pack.leaf].values() if isinstance(s, Tensor)]
            assert all(s.isfinite().all() for s in states)


def _assert_same(packed: Run, plain: Run) -> None:
    """In all that can be saved."""
    assert packed.model.state_dict().keys() == plain.model.state_dict().keys()
    torch.testing.assert_close(packed.model.state_dict(), plain.model.state_dict())
    one, other = packed.optimizer.state_dict(), plain.optimizer.state_dict()
    assert one["param_groups"] == other["param_groups"]
    torch.testing.assert_close(one["state"], other["state"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same(name: str) -> None:
    """20 steps, the first one plain, so that there are states to join; checkpoints both ways."""
    plain, packed = Run(False, name), Run(True, name)
    assert plain.step(0) == packed.step(0, packed.model)
    for seed in range(1, 20):
        assert packed.step(seed) == pytest.approx(plain.step(seed), rel=1e-9)
    _assert_in_order(packed, padded_packs=4)
    assert packed.leaves() == 4
    _assert_same(packed, plain)
    saved = copy.deepcopy(
        [(r.model.state_dict(), r.optimizer.state_dict()) for r in (plain, packed)]
    )
    for run, (model, optimizer) in zip((packed, plain), saved, strict=True):
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
    assert packed.step(20) == pytest.approx(plain.step(20), rel=1e-9)
    _assert_in_order(packed, padded_packs=4)
    packed.packer.release()
    packed.packing.dissolve()
    assert packed.leaves() == 16
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in packed.model.parameters())
    assert packed.step(21, packed.model) == pytest.approx(plain.step(21), rel=1e-9)
    _assert_same(packed, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("adopt", [True, False])
def test_strides_behind_a_stack_stay_what_they_were(dtype: torch.dtype, adopt: bool) -> None:
    runs = [Run(p, make=Handmade, dtype=dtype, adopt=adopt) for p in (True, False)]
    for seed in range(3):
        losses = [run.step(seed) for run in runs]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
    _assert_in_order(runs[0], padded_packs=2)
    if dtype != torch.bfloat16:
        _assert_same(*runs)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    for make in (Fields, Handmade):
        runs = [Run(p, "adamw fused", make, inner="inductor") for p in (True, False)]
        for seed in range(3):
            losses = [run.step(seed, clip=0.1) for run in runs]
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        _assert_in_order(runs[0], padded_packs=4 if make is Fields else 2)
        _assert_same(*runs)


def test_clipping_by_norm() -> None:
    plain, packed = Run(False), Run(True)
    for seed in range(4):
        assert packed.step(seed, clip=0.01) == pytest.approx(plain.step(seed, clip=0.01), rel=1e-9)
    _assert_in_order(packed, padded_packs=4)
    _assert_same(packed, plain)


def test_batches_of_other_sizes() -> None:
    plain, packed = Run(False), Run(True)
    for seed, rows in enumerate((6, 4, 9, 3)):
        assert packed.step(seed, rows=rows) == pytest.approx(plain.step(seed, rows=rows), rel=1e-9)
    assert len(packed.packing.packs) == 4
    _assert_same(packed, plain)


def test_gradients_of_parameters_and_their_hooks() -> None:
    """Without an optimizer that steps on packs, parameters have their gradients themselves."""
    plain, packed = Run(False), Run(True)
    seen: list[torch.Size] = []
    packed.model.norms[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    for seed in range(3):
        assert packed.step(seed) == pytest.approx(plain.step(seed), rel=1e-9)
    assert seen == [(5,)] * 3
    assert any("has hooks" in reason for reason in packed.packing.declined)
    assert packed.leaves() == 4 + 3
    _assert_same(packed, plain)


@pytest.mark.parametrize("limit", [0, 64])
def test_modules_that_share_a_graph(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimus.packed_calls.MANY_MODULES", limit)
    torch._dynamo.reset()
    models = [Fields().double() for _ in range(3)]
    twins, packing = copy.deepcopy(models), Packing(alignment=ALIGNMENT)
    backend = OptimusBackend(inner="aot_eager", packing=packing, verify=False, strict=True)
    compiled = [torch.compile(model, backend=backend) for model in models]
    for _ in range(2):
        x = torch.randn(6, 20, dtype=torch.float64)
        for run, twin in zip(compiled, twins, strict=True):
            torch.testing.assert_close(run(x), twin(x))
            for call in (run, twin):
                call(x).square().sum().backward()
    for model, twin in zip(models, twins, strict=True):
        for own, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, plain.grad)
    assert len(backend.report.graphs) == 1
    assert len(packing.packs) == (12 if limit else 4)


def test_gradients_from_outside_and_from_before() -> None:
    plain, packed = Run(False, "sgd"), Run(True, "sgd")
    for run in (plain, packed):
        for call in (run.model, run.call, run.call):
            x = torch.randn(6, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            penalty = sum(p.square().sum() for p in run.model.parameters())
            (call(x).square().mean() + 0.1 * penalty).backward()
        run.optimizer.step()
    _assert_in_order(packed, padded_packs=4)
    _assert_same(packed, plain)


def test_parameters_moved_away_are_moved_back() -> None:
    plain, packed = Run(False), Run(True)
    for run in (packed, plain):
        run.step(0)
        run.model.float().double()
        run.step(1)
    _assert_in_order(packed, padded_packs=4)
    _assert_same(packed, plain)


def test_no_optimizer_divides_by_zero_between_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "eps", lambda p: torch.optim.Adam(p, lr=0.1, eps=0.0))
    plain, packed = Run(False, "eps"), Run(True, "eps")
    for seed in range(3):
        assert packed.step(seed) == pytest.approx(plain.step(seed), rel=1e-9)
    assert any("divided by eps" in reason for reason in packed.packing.declined)
    assert packed.leaves() == 16
    _assert_in_order(packed, padded_packs=4)
    _assert_same(packed, plain)


class Joined(nn.Module):
    """What begins elsewhere and is no stack of parameters."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.own = nn.ParameterList(torch.randn(5) for _ in range(3))
        for i in range(3):
            self.register_buffer(f"buffer_{i}", torch.randn(5))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "cat":
            return torch.cat(list(self.own)) * x
        if self.what == "stack of cats":
            pairs = [torch.cat([self.own[i], self.own[j]]) for i, j in ((0, 1), (2, 1))]
            return torch.stack(pairs)[0, 0] * x
        return torch.stack([self.buffer_0, self.buffer_1, self.buffer_2]).flatten() * x


@pytest.mark.parametrize(
    ("what", "reason"), [("cat", "in a cat"), ("stack of cats", "twice"), ("buffers", "buffers")]
)
def test_others_are_declined(what: str, reason: str) -> None:
    torch._dynamo.reset()
    model, packing = Joined(what), Packing(alignment=ALIGNMENT)
    backend = OptimusBackend("none", inner="aot_eager", packing=packing, strict=True)
    x = torch.randn(2, 15)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert not packing.packs
    assert [r for r in packing.declined if reason in r]


_STACK = [Part((("select", (0, i)),)) for i in range(3)]
_STACKS = [Part((("select", (0, i)), ("select", (0, j)))) for i in range(2) for j in range(2)]
_CAT = [Part((("narrow", (0, 5 * i, 5)),)) for i in range(3)]


@pytest.mark.parametrize(
    ("width", "dtype", "wrong", "row"),
    [
        (4, torch.float32, False, 4),
        (6, torch.float32, True, 8),
        (10, torch.float32, True, 12),
        (1, torch.float32, False, 4),
        (4, torch.bfloat16, True, 8),
        (8, torch.bfloat16, False, 8),
        (9, torch.bfloat16, True, 16),
        (2, torch.float64, False, 2),
        (3, torch.float64, True, 4),
        (3, torch.complex128, False, 3),
    ],
)
def test_where_members_begin(width: int, dtype: torch.dtype, wrong: bool, row: int) -> None:
    """Where a Triton kernel compiled before they were moved would fail on a GPU, and the cure."""
    first = torch.zeros(width, dtype=dtype)
    assert misplaced(first, _STACK, (3, width), ALIGNMENT) == wrong
    assert not misplaced(first, _STACK, (3, width), 1)
    found = padded(first, _STACK, (3, width), ALIGNMENT)
    assert found is not None
    assert found[1] == (3, row)
    assert not misplaced(first, *found, ALIGNMENT)


def test_rooms_of_matrices_in_stacks_of_stacks() -> None:
    members = [torch.randn(3, 3) for _ in range(4)]
    found = padded(members[0], _STACKS, (2, 2, 3, 3), ALIGNMENT)
    assert found is not None
    assert found[1] == (2, 2, 12)
    pack = Pack.of(copied := [m.clone() for m in members], *found)
    assert pack.is_padded
    assert all(map(torch.equal, copied, members))
    assert all(m.is_contiguous() for m in copied)
    assert not _between(pack, pack.whole).any()


def test_cats_have_no_room() -> None:
    assert misplaced(torch.zeros(5), _CAT, (15,), ALIGNMENT)
    assert padded(torch.zeros(5), _CAT, (15,), ALIGNMENT) is None
