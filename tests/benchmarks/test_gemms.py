"""Under all patterns the naive models come to no more GEMMs than those fused by hand.

With -s it prints copies, saved activations and parameter leaves of both, too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

from benchmarks.models import MODELS, BenchmarkModel
from optimus.backend import copy_graph_module
from optimus.driver import rewrite
from optimus.packing import Packing
from optimus.pipeline import select
from optimus.verify import Verifier
from tests.optimus.capture import Captured
from tests.optimus.counting import Counts, count

CPU = torch.device("cpu")


@dataclass
class Measured:
    """One model's graph as captured, as rewritten, and as written by hand."""

    plain: Counts
    now: Counts
    by_hand: Counts
    leaves: int
    leaves_by_hand: int
    difference: str | None


def measure(model: BenchmarkModel) -> Measured:
    """Rewrite and pack the naive model, and compare it with itself on one batch."""
    torch.manual_seed(0)
    naive, inputs = model.build("small"), model.inputs(8, CPU, "small")
    assert model.fused is not None
    fused = model.fused(copy.deepcopy(naive))
    captured, by_hand = Captured(naive, inputs), Captured(fused, inputs)
    module = copy_graph_module(captured.module)
    rewrite(module, select("all").phases, strict=True)
    difference = Verifier(captured.module, captured.inputs).difference(module)
    now = count(module, captured.inputs)
    _, packed, _ = Packing().pack_graph(module, captured.inputs)
    return Measured(
        count(captured.module, captured.inputs),
        now,
        count(by_hand.module, by_hand.inputs),
        len(packed) - len(captured.inputs) + len(list(naive.parameters())),
        len(list(fused.parameters())),
        difference,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if m.fused is not None])
def test_model(name: str) -> None:
    measured = measure(MODELS[name])
    print(name, measured)
    assert measured.difference is None
    assert measured.now.forward_gemms < measured.plain.forward_gemms
    assert measured.now.forward_gemms <= measured.by_hand.forward_gemms
    assert measured.now.backward_gemms <= measured.by_hand.backward_gemms
