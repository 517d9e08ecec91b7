"""Index buffers are taken for what they hold, as long as they hold it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import optimus
from optimus import settled
from optimus.backend import OptimusBackend

FEATURES, SIZE = 3, 4


class Interaction(torch.nn.Module):
    """DLRM's interaction, its pairs in a buffer; `writes`: it changes them as it runs."""

    indices: Tensor

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        vectors = FEATURES + 1
        self.register_buffer("indices", torch.triu_indices(vectors, vectors, 1))
        self.dense = torch.nn.Linear(SIZE, SIZE)
        self.writes = writes

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        dense = self.dense(dense)
        if self.writes:
            self.indices.copy_(self.indices.flip(1))
        vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((dense, products[:, self.indices[0], self.indices[1]]), 1)


IS_DISTRIBUTED = settled._is_distributed


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever group of processes other tests have left."""
    monkeypatch.setattr(settled, "_is_distributed", lambda: False)


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the graphs that are compiled call."""
    seen: list[object] = []
    own = OptimusBackend._packed

    def packed(self: OptimusBackend, module: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(node.target for node in module.graph.nodes)
        return own(self, module, inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(OptimusBackend, "_packed", packed)
    return seen


BACKEND = functools.partial(
    OptimusBackend,
    "all",
    knobs={"fuse_dot_interaction": {"gate": "always"}},
    inner="aot_eager",
    verify=False,
    strict=True,
)


class Towers(torch.nn.Module):
    """Towers behind the interaction, alike, whose parameters are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.interaction = Interaction()
        width = SIZE + (FEATURES + 1) * FEATURES // 2
        self.towers = torch.nn.ModuleList(torch.nn.Linear(width, 3) for _ in range(4))

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        both = self.interaction(dense, embedded)
        return torch.cat([tower(both * i).relu() for i, tower in enumerate(self.towers)], 1)


def compiled(module: torch.nn.Module) -> Callable[..., Tensor]:
    return torch.compile(module, backend=BACKEND())  # type: ignore[call-overload]


def check(module: torch.nn.Module, run: Callable[..., Tensor], batch: int = 5) -> None:
    """Values and gradients are those of eager mode."""
    inputs = [torch.randn(batch, SIZE), torch.randn(batch, FEATURES, SIZE)]
    leaves = [x.requires_grad_() for x in inputs]
    wanted = [*leaves, *module.parameters()]
    found, expected = (f(*leaves) for f in (run, module))
    torch.testing.assert_close(found, expected)
    for mine, own in zip(
        torch.autograd.grad(found.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(mine, own)


def reverse(module: Interaction) -> None:
    """Other pairs than a triangle's."""
    module.indices.copy_(module.indices.flip(1))


def test_the_compiler_sees_the_kernel_that_knows_its_pairs(targets: list[object]) -> None:
    module = Interaction()
    check(module, compiled(module))
    assert torch.ops.kernels.dot_interaction.default in targets
    assert torch.ops.kernels.dot_interaction_at.default not in targets


@pytest.mark.parametrize("sizes", [(5,), (5, 7, 6)], ids=["static", "dynamic"])
def test_a_buffer_that_changes_is_noticed(
    sizes: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    module = Interaction()
    run = compiled(module)
    for size in sizes:
        check(module, run, size)
    reverse(module)
    for size in sizes:
        check(module, run, size)
    assert "has changed" in caplog.text
    reverse(module)
    check(module, run)


def test_the_same_pairs_written_again_are_no_change(caplog: pytest.LogCaptureFixture) -> None:
    module = Interaction()
    run = compiled(module)
    check(module, run)
    for _ in range(3):
        module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()})
        check(module, run)
    module.indices = module.indices.clone()
    check(module, run)
    assert "has changed" not in caplog.text


@pytest.mark.parametrize(("initialized", "size"), [(False, 2), (True, 1), (True, 2)])
def test_processes_that_train_together_are_noticed(
    initialized: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    assert IS_DISTRIBUTED() is (initialized and size == 2)


def test_their_buffers_are_looked_at_in_each_step(
    targets: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled, "_is_distributed", lambda: True)
    module = Interaction()
    check(module, compiled(module))
    assert torch.ops.kernels.dot_interaction_at.default in targets


def test_a_buffer_that_is_written_in_every_step_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settled, "MOST_LOOKS", 2)
    module = Interaction()
    run = compiled(module)
    for times in (2, 2, 3):  # now and then it may be, as often as anybody likes
        assert "has changed" not in caplog.text
        check(module, run)
        for _ in range(times):
            module.indices.copy_(module.indices.clone())
            check(module, run)
    assert "has changed" in caplog.text


def test_buffers_of_modules_in_turns_are_all_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settled, "MOST_LOOKS", 2)
    modules = [Interaction() for _ in range(3)]

    @torch.compile(backend=BACKEND())
    def call(module: Interaction, dense: Tensor, embedded: Tensor) -> Tensor:
        return module(dense, embedded)

    for module in modules * 4:
        check(module, lambda *inputs, module=module: call(module, *inputs))
    assert "has changed" not in caplog.text


def test_indices_that_the_caller_gives_are_not_the_models_own(targets: list[object]) -> None:
    module = Interaction()

    @torch.compile(backend=BACKEND())
    def call(dense: Tensor, embedded: Tensor, indices: Tensor) -> Tensor:
        vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((dense, products[:, indices[0], indices[1]]), 1)

    call(torch.randn(5, SIZE), torch.randn(5, FEATURES, SIZE), module.indices.clone())
    assert torch.ops.kernels.dot_interaction_at.default in targets


def test_packed_parameters_learn_from_the_graph_that_runs_as_it_is() -> None:
    """As much as in eager mode, whatever the optimizer steps on."""
    module, twin = Towers(), Towers()
    twin.load_state_dict(module.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, twin)]
    knobs = {"fuse_dot_interaction": {"gate": "always"}}
    run = optimus.compile(
        module, optimizers=optimizers[:1], inner="aot_eager", knobs=knobs, strict=True
    )
    for step in range(6):
        if step == 3:
            for each in (module, twin):
                reverse(each.interaction)
        inputs = torch.randn(5, SIZE), torch.randn(5, FEATURES, SIZE)
        for forward, optimizer in zip((run, twin), optimizers, strict=True):
            optimizer.zero_grad()
            forward(*inputs).square().mean().backward()
            optimizer.step()
        for mine, own in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, own)


def test_modules_that_share_a_graph_have_pairs_of_their_own() -> None:
    one, other = Interaction(), Interaction()
    reverse(other)

    @torch.compile(backend=BACKEND())
    def call(module: Interaction, dense: Tensor, embedded: Tensor) -> Tensor:
        return module(dense, embedded)

    for module in (one, other, one):
        check(module, lambda *inputs, module=module: call(module, *inputs))


def test_what_the_graph_writes_itself_is_left_alone(targets: list[object]) -> None:
    module, twin = Interaction(writes=True), Interaction(writes=True)
    twin.load_state_dict(module.state_dict())
    run = compiled(module)
    inputs = torch.randn(5, SIZE), torch.randn(5, FEATURES, SIZE)
    for _ in range(3):
        torch.testing.assert_close(run(*inputs), twin(*inputs))
        assert torch.equal(module.indices, twin.indices)
    assert torch.ops.kernels.dot_interaction.default not in targets
