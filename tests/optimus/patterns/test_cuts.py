"""Random graphs of cuts and joins under all normalisations and vertical rewrites.

OPTIMUS_FUZZ_CUTS says how many are tried (150 in CI); always the same ones, from seed 0 on.
"""

from __future__ import annotations

import os

import pytest
import torch

from optimus.backend import copy_graph_module
from optimus.driver import rewrite
from optimus.pipeline import select
from optimus.verify import Verifier
from tests.optimus.patterns.cuts import random_cuts
from tests.optimus.patterns.rewriting import listing

NUM_GRAPHS = int(os.environ.get("OPTIMUS_FUZZ_CUTS", "150"))
PHASES = select("vertical").phases


@pytest.mark.parametrize("seed", range(NUM_GRAPHS))
def test_meaning(seed: int) -> None:
    original, inputs = random_cuts(seed)
    module = copy_graph_module(original)
    rewrite(module, PHASES, strict=True)
    difference = Verifier(original, inputs).difference(module)
    assert difference is None, f"{difference}\n{listing(original)}\n\n{listing(module)}"


@pytest.mark.parametrize("seed", range(NUM_GRAPHS))
def test_second_run_does_nothing(seed: int) -> None:
    module, _ = random_cuts(seed, returns_views=False)
    rewrite(module, PHASES, strict=True)
    if torch.clone in {node.target for node in module.graph.nodes}:
        return  # made last of all, for what is returned: it is new to every pattern
    first = listing(module)
    fired = {r.name: r.fired for r in rewrite(module, PHASES, strict=True) if r.fired}
    assert not fired, f"{fired}\n{first}\n\n{listing(module)}"


def test_the_graphs_give_every_cut_and_join_something_to_do() -> None:
    names = {
        *("cancel_split_cat", "cancel_cat_split", "cancel_unbind_stack", "cancel_stack_unbind"),
        *("merge_unbind_cat", "merge_split_stack", "merge_runs_in_stack", "merge_nested_splits"),
        *("merge_slices_to_split", "merge_selects_to_unbind", "move_reshape_out_of_stack"),
    }
    for seed in range(150):
        reports = rewrite(random_cuts(seed)[0], PHASES, strict=True)
        names -= {report.name for report in reports if report.fired}
        if not names:
            return
    raise AssertionError(f"nothing for {sorted(names)} to do")
