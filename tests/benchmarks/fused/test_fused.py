"""Every hand-fused model computes and learns what the naive one does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import MODELS, BenchmarkModel, Inputs

FUSED = [name for name, model in MODELS.items() if model.fused is not None]
CPU = torch.device("cpu")
# Parameter leaves at the public size, naive and fused; 340, 20 and 172, 22 are what was measured.
LEAVES = {
    "mmoe": (340, 20),
    "mmoe_3_experts": (3 * 6 + 2 * 2 + 2 * 8, 6 + 2 + 8),
    "mmoe_8_experts": (8 * 6 + 2 * 2 + 2 * 8, 6 + 2 + 8),
    "ple": (81 * 2 + (3 + 3 + 2) * 2 + 2 * 8, 3 * (6 + 2) + 2 * 2 + 8),
    "heavy_ranker": (2 + 6 + 4 * 10 + 2 + 60, 2 + 2 + 10 + 2 + 6),
    "rankmixer": (172, 22),
    "rankmixer_100m": (172, 22),
    "masknet": (39 * 2 + 3 * 7 + 2, 2 + 2 + 4 + 3 * 3 + 2),
    "masknet_parallel": (39 * 2 + 2 * 7 + 12, 2 + 2 + 2 + 1 + 2 + 12),
    "wukong": (6 + (3 + 6 + 2) + (2 + 6 + 2) + 6, 6 + (1 + 6 + 2) * 2 + 6),
    "per_feature_encoder": (64 * 6 + 6, 6 + 6),
    "illustrative": (2104, 2),
}


@pytest.fixture(params=FUSED)
def model(request: pytest.FixtureRequest) -> BenchmarkModel:
    torch.manual_seed(0)
    return MODELS[request.param]


def double(model: BenchmarkModel) -> tuple[nn.Module, nn.Module, Inputs]:
    """Naive, fused and inputs, in float64, none of the weights at a value that hides a fault."""
    naive = model.build("small").double()
    with torch.no_grad():
        for parameter in naive.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert model.fused is not None
    inputs = tuple(
        x.detach().double().requires_grad_(x.requires_grad) for x in model.inputs(5, CPU, "small")
    )
    return naive, model.fused(copy.deepcopy(naive)), inputs


def learn(module: nn.Module, inputs: Inputs) -> tuple[Tensor, list[Tensor | None]]:
    """Logits and gradients of the inputs; a step on all parameters."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    logits = module(*leaves)
    (
        logits * torch.linspace(-1, 2, logits.numel(), dtype=torch.double).view_as(logits)
    ).sum().backward()
    optimizer.step()
    return logits, [x.grad for x in leaves]


def test_same_logits_gradients_and_step(model: BenchmarkModel) -> None:
    naive, fused, inputs = double(model)
    expected, expected_gradients = learn(naive, inputs)
    logits, gradients = learn(fused, inputs)
    assert logits.shape == (5, model.small.num_tasks)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(gradients, expected_gradients)
    # The fused model after a step is the fused form of the naive model after its step.
    assert model.fused is not None
    torch.testing.assert_close(fused.state_dict(), model.fused(naive).state_dict())


def test_every_parameter_learns(model: BenchmarkModel) -> None:
    _, fused, inputs = double(model)
    learn(fused, inputs)
    assert all(p.grad is not None and p.grad.any() for p in fused.parameters())


def test_same_logits_in_evaluation(model: BenchmarkModel) -> None:
    naive, fused, inputs = double(model)
    torch.testing.assert_close(fused.eval()(*inputs), naive.eval()(*inputs))


def test_number_of_parameter_leaves() -> None:
    assert LEAVES.keys() == set(FUSED)
    for name, (naive_leaves, fused_leaves) in LEAVES.items():
        model = MODELS[name]
        with torch.device("meta"):
            naive = model.build("full")
            assert len(list(naive.parameters())) == naive_leaves, name
            assert model.fused is not None
            assert len(list(model.fused(naive).parameters())) == fused_leaves, name


def test_the_fused_ple_refuses_unequal_experts() -> None:
    from recsys.models.ple import PLE

    schema = MODELS["ple"].small.schema()
    naive = PLE(schema, embedding_dim=4, num_task_experts=(2, 3, 4), num_shared_experts=(2, 3, 3))
    with pytest.raises(ValueError, match="4 experts a task and 3 shared ones"):
        MODELS["ple"].fused(naive.dense_arch)  # type: ignore[misc]


def test_the_fused_rankmixer_refuses_unequal_tokens() -> None:
    from recsys.models.rankmixer import RankMixer

    naive = RankMixer(
        MODELS["rankmixer"].small.schema(), embedding_dim=3, num_tokens=7, token_dim=7
    )
    with pytest.raises(ValueError, match="needs equal tokens"):
        MODELS["rankmixer"].fused(naive.dense_arch)  # type: ignore[misc]
