"""The estimate of a step's memory, and that rewritten models hold no more by it than as written."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from benchmarks.models import MODELS
from benchmarks.providers import objective_of
from optimus import peak_memory
from optimus.backend import OptimusBackend
from optimus.packing import Packing
from optimus.partitioning import PartitionByEstimate
from optimus.peak_memory import Estimate, Unsized, estimate

Halves = tuple[GraphModule, GraphModule]
AS_EVER = min_cut_rematerialization_partition


class _Enough(Exception):
    """Raised once a graph is partitioned: nothing is to be compiled."""


class _Watch(CustomPartitionerFn):
    """Partitions, and keeps the estimate."""

    def __init__(self, partition: Callable[..., Halves]) -> None:
        self._partition = partition
        self.found: Estimate | None = None

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        forward, backward = self._partition(gm, joint_inputs, **kwargs)
        self.found = estimate(forward.graph, backward.graph)
        raise _Enough

    def uuid(self) -> str:
        return "watch"


def _estimated(
    call: Callable[..., Any],
    inputs: Sequence[Any],
    partition: Any,
    patterns: str = "none",
    dynamic: bool = False,
) -> Estimate:
    torch._dynamo.reset()
    watch = _Watch(partition)
    backend = OptimusBackend(
        patterns,
        inner_options={"custom_partitioner_fn": watch},
        verify=False,
        packing=Packing() if patterns != "none" else None,
        strict=True,
    )
    compiled: Any = torch.compile(call, backend=backend, dynamic=dynamic)  # type: ignore[call-overload]
    with suppress(Exception), torch.autocast("cpu", torch.bfloat16):
        compiled(*inputs)
    assert watch.found is not None
    return watch.found


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_kept_and_held_is_counted(dynamic: bool) -> None:
    """Activations of 64 KiB, weights of 32: kept are the cast of the input, what the second layer
    reads, where its result is cut, and the cast of its weight. Backward makes two gradients of
    activations and one of a weight and a bias, when all but the cuts and the cast weight is left.
    """
    net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    x = torch.randn(256, 128)
    found = _estimated(lambda x: net(x).sum(), (x,), AS_EVER, dynamic=dynamic)
    gradient_in = 2
    assert found.saved == 2**10 * (64 + 64 + 32 + 32) + gradient_in
    assert found.backward == 2**10 * (64 + 64 + 2 * 64 + 32) + 256


def test_a_mask_is_not_saved_beside_the_stack_that_it_is_made_of() -> None:
    first = nn.Linear(64, 4 * 256)
    second, third = (nn.Parameter(torch.randn(4, *s)) for s in ((256, 128), (128, 64)))

    def towers(x: Tensor) -> Tensor:
        hidden = first(x).relu().view(-1, 4, 256).transpose(0, 1)
        return torch.bmm(torch.bmm(hidden, second).relu(), third).relu().square().sum()

    inputs = (torch.randn(4096, 64),)
    as_ever, chosen = (_estimated(towers, inputs, p) for p in (AS_EVER, PartitionByEstimate()))
    assert as_ever.saved - chosen.saved == 4096 * 4 * 256
    assert chosen.peak < as_ever.peak


def test_a_stack_in_float32_that_several_read_counts() -> None:
    """A norm's result and ReLU's gradient, which both of the norm's gradients read."""
    sizes = ((4, 32, 64), (4, 1, 64), (4, 1, 64), (4, 64, 16))
    up, scale, shift, down = (nn.Parameter(torch.randn(size)) for size in sizes)

    def towers(x: Tensor) -> Tensor:
        hidden = torch.bmm(x, up).float()
        hidden = nn.functional.layer_norm(hidden, (64,)) * scale + shift
        return torch.bmm(hidden.relu(), down).float().square().sum()

    inputs = (torch.randn(4, 256, 32, requires_grad=True),)
    as_written = _estimated(towers, inputs, AS_EVER)
    rounded = _estimated(towers, inputs, AS_EVER, "round_before_relu")
    assert rounded.backward < 0.9 * as_written.backward


def test_without_an_estimate_all_is_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsized(*_: Any) -> Estimate:
        raise Unsized

    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    inputs = (torch.randn(16, 8),)
    as_ever = _estimated(layers, inputs, AS_EVER)
    monkeypatch.setattr(peak_memory, "estimate", unsized)
    assert _estimated(layers, inputs, PartitionByEstimate()) == as_ever


def test_the_partitioner_is_one_for_all_caches() -> None:
    one, other = PartitionByEstimate(), PartitionByEstimate()
    assert pickle.dumps(one) == pickle.dumps(other)
    assert one.uuid() == other.uuid()


PLAIN = {"per_feature_encoder": 168, "ple": 217, "wukong": 415, "masknet": 55, "mmoe": 354}
"""MiB that torch.compile held at most on a GPU, less 65 of workspaces of GEMMs, parameters, inputs
and what the optimizer keeps (benchmarks/results/step.csv, from commit 5af37b3 on)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_a_rewritten_model_holds_less_than_plain_compile(name: str) -> None:
    model = MODELS[name]
    torch.manual_seed(0)
    module = model.build("full")
    inputs = model.inputs(4096, torch.device("cpu"), "full")
    labels = torch.zeros(4096, model.full.num_tasks)
    call, given = objective_of(module), (*inputs, labels)
    found = _estimated(call, given, PartitionByEstimate(), "all")
    assert found.peak < PLAIN[name] * 2**20
