"""GEMM launches, copies and saved activations of the coverage models under all patterns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from optimus.backend import copy_graph_module
from optimus.driver import rewrite
from optimus.ops import op_of
from optimus.pipeline import select
from optimus.verify import Verifier
from tests.optimus import coverage_models as models
from tests.optimus.capture import Captured
from tests.optimus.counting import Counts, count
from tests.optimus.coverage_models import Model, OtherWords, Words

BATCH = 64


@dataclass
class Measured:
    """A model's graph as captured and as rewritten."""

    plain: Counts
    now: Counts
    difference: str | None


def measure(model: Model) -> Measured:
    """Count both graphs, and compare their values and gradients on one batch."""
    torch.manual_seed(0)
    captured = Captured(model, model.inputs(BATCH))
    module = copy_graph_module(captured.module)
    rewrite(module, select("all").phases, strict=True)
    difference = Verifier(captured.module, captured.inputs).difference(module)
    plain = count(captured.module, captured.inputs)
    return Measured(plain, count(module, captured.inputs), difference)


# GEMMs forward and backward: at most allowed, and reached.
GEMMS = {
    models.Towers: ((2, 4), (2, 4)),
    models.SliceTowers: ((2, 4), (2, 4)),
    models.HetTowers: ((6, 12), (6, 12)),
    models.ChunkGate: ((1, 2), (1, 2)),
    models.Mmoe: ((5, 8), (3, 6)),
    models.Ple: ((6, 12), (4, 8)),
    models.Dcnv2: ((10, 20), (9, 18)),
    models.Dhen: ((9, 16), (8, 16)),
    models.Wukong: ((13, 26), (12, 24)),
    models.Lce: ((2, 4), (2, 4)),
    models.Dlrm: ((6, 9), (5, 9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", [Words, OtherWords])
@pytest.mark.parametrize("kind", GEMMS)
def test_model(kind: type[Model], words: type[Words]) -> None:
    """The GEMMs that are allowed, no more copies or saved activations than without Optimus, and
    the same results."""
    measured = measure(kind(words()))
    print(kind.__name__, words.__name__, measured)
    assert measured.difference is None
    allowed, reached = GEMMS[kind]
    assert measured.now.gemms == reached
    assert reached[0] <= allowed[0] and reached[1] <= allowed[1]
    assert measured.now.copied_bytes <= measured.plain.copied_bytes
    assert measured.now.saved_bytes <= measured.plain.saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", [models.Mmoe, models.Ple, models.Dcnv2, models.Towers])
def test_autocast_and_dynamic_batch(kind: type[Model]) -> None:
    """The same number of calls as with a static batch in float32."""
    model = kind()
    captured = [
        _rewritten(model, dynamic=False, autocast=False),
        _rewritten(model, dynamic=True, autocast=False),
        _rewritten(model, dynamic=False, autocast=True),
    ]
    assert len(set(captured)) == 1, captured


def _rewritten(model: Model, dynamic: bool, autocast: bool) -> int:
    """How many linears and batched products are left; asserts that results are the same."""

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out: torch.Tensor = model(*inputs)
        return out

    torch.manual_seed(0)
    captured = Captured(run, model.inputs(BATCH), dynamic)
    module = copy_graph_module(captured.module)
    rewrite(module, select("all").phases, strict=True)
    assert Verifier(captured.module, captured.inputs).difference(module) is None
    called = Counter(op.name for node in module.graph.nodes if (op := op_of(node)) is not None)
    return called["linear"] + called["bmm"] + called["baddbmm"]
