"""`optimus.compile`, and the backend by its name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo
from torch.utils.checkpoint import checkpoint

import optimus
from optimus.backend import OptimusBackend
from optimus.packing import Packing
from optimus.partitioning import Recompute


@pytest.mark.parametrize("kind", ["linear", "sequential"])
def test_a_module_is_compiled_in_place(kind: str) -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 3) if kind == "linear" else nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    twin = copy.deepcopy(model)
    keys = list(model.state_dict())
    assert optimus.compile(model, inner="aot_eager") is model
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), twin(x))
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(copy.deepcopy(model)(x), twin(x))


def test_a_function_is_compiled() -> None:
    torch._dynamo.reset()
    run = optimus.compile(lambda x: torch.relu(x) + 1, inner="aot_eager")
    x = torch.randn(3)
    assert torch.equal(run(x), torch.relu(x) + 1)


def test_the_backend_has_a_name() -> None:
    torch._dynamo.reset()
    options = {"patterns": "all", "inner": "aot_eager"}
    run = torch.compile(lambda x: torch.relu(x) + 1, backend="optimus", options=options)
    x = torch.randn(3)
    assert torch.equal(run(x), torch.relu(x) + 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"patterns": "batch_lineers"}, "batch_linears"),
        ({"patterns": ["all", "vertcal"]}, "vertical"),
        ({"disable": ["batch_linearz"]}, "batch_linears"),
        ({"knobs": {"batch_linears": {"size": 3}}}, "batch_linears"),
        ({"inner": "inductr"}, "inductor"),
        ({"recompute": "atuo"}, "auto"),
        ({"inner_options": {"max_autotun": True}}, "max_autotune"),
        ({"inner": "eager", "inner_options": {"max_autotune": True}}, "takes none"),
    ],
)
def test_what_is_misspelt_is_refused_and_the_nearest_named(
    arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        optimus.compile(nn.Linear(2, 2), **arguments)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    compiled = torch.compile(torch.relu, backend="optimus", options={"pattern": "all"})
    with pytest.raises(Exception, match="unknown option 'pattern'; nearest valid: patterns"):
        compiled(torch.ones(2))


@pytest.mark.slow
def test_what_needs_no_gemm_is_made_anew_for_the_backward_pass() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8))
                for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([tower(x[:, i]) for i, tower in enumerate(self.towers)], 1)

    torch.manual_seed(0)
    model, x = Towers(), torch.randn(64, 4, 16)

    def train(recompute: Recompute) -> tuple[int, list[torch.Tensor]]:
        """Bytes kept for backward that are no parameter's, and the gradients."""
        torch._dynamo.reset()
        twin = optimus.compile(copy.deepcopy(model), recompute=recompute)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autocast("cpu", torch.bfloat16):
            twin(x)  # compiled and verified, which keeps more
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            out = twin(x)
        for parameter in twin.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        out.float().square().sum().backward()
        gradients = [p.grad for p in twin.parameters() if p.grad is not None]
        return sum(kept.values()), gradients

    plain, expected = train(False)
    cases: tuple[tuple[Recompute, float], ...] = ((True, 0.8), ("auto", 1.0))
    for recompute, most in cases:
        kept, gradients = train(recompute)
        assert kept <= most * plain, (recompute, kept, plain)
        assert len(gradients) == len(list(model.parameters()))
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted)


def test_the_compiler_still_knows_which_inputs_are_parameters() -> None:
    """They keep their addresses: saving them costs nothing, CUDA graphs need not copy them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([tower(x[:, i]) for i, tower in enumerate(self.towers)], 1)

    static: list[tuple[int, int]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        descriptions: list[object] = []
        known = _try_get_metadata_from_dynamo(module, {}.keys(), len(inputs), descriptions)
        static.append((len(known[1]), len(inputs)))
        return module.forward

    for patterns in ("none", "all"):
        torch._dynamo.reset()
        optimus_backend = OptimusBackend(patterns, inner="eager", packing=Packing())
        optimus_backend._compile = backend  # type: ignore[method-assign,assignment]
        torch.compile(Model(), backend=optimus_backend)(torch.randn(5, 3, 4))
    assert static == [(6, 7), (2, 3)]


class _Rounds(nn.Module):
    """A number read off the device, which Inductor wants as a constant in what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.sum().item()
        parts = torch.cat([layer(x) for layer in self.layers], 1)
        return parts * (0.5 + round(size, 3))


def test_dynamo_may_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    plain = _Rounds()
    compiled = optimus.compile(copy.deepcopy(plain), patterns="all", explain="batch_linears")
    for rows in (8, 8, 6):  # numbers are constants until they change
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), plain(x))
    report = optimus.report(compiled)
    assert [graph.fallback for graph in report.graphs] == [""] * len(report.graphs)
    assert [graph.index for graph in report.graphs] == list(range(len(report.graphs)))
    assert [e.graph for e in report.explanations] == [graph.index for graph in report.graphs]
    assert "Restart" not in caplog.text


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"option of optimus\.compile 'patern'.*: patterns"):
        optimus.compile(nn.Linear(2, 2), patern="all")


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(self.layers, x.split(4, 1), strict=True)
        return torch.cat([F.dropout(layer(part).tanh(), 0.5) for layer, part in parts], 1)


@pytest.mark.parametrize("verify", [False, True])
def test_a_checkpoint_around_a_call_sees_nothing_of_the_compile(verify: bool) -> None:
    """It counts what is saved for backward, once in forward and once when it runs that again."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Towers()
    backend = OptimusBackend(inner="aot_eager", packing=Packing(), verify=verify, strict=True)
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(4, 16)
    found: list[list[torch.Tensor | None]] = []
    for run in (compiled, compiled, model):
        torch.manual_seed(1)
        checkpoint(run, x, use_reentrant=False).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert backend.report.graphs[0].fired
    torch.testing.assert_close(found[:2], [found[2]] * 2)


def test_pytorch_says_whether_hooks_on_what_is_saved_are_allowed() -> None:
    """A private name: without it a compile where they are not would fall back."""
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
