"""Every graph written to mislead a rewriter does under all patterns what it does in eager mode.

Those written in bulk are checked in their first mode alone, unless OPTIMUS_ALL_MODES is set.
"""

from __future__ import annotations

import os

import pytest
import torch

from optimus.testing import check_program
from tests.optimus.adversarial import (
    chains,
    contexts,
    layers,
    layouts,
    norms,
    numbers,
    operands,
    products,
    returns,
    shrunk,
    sizes,
    writes,
)
from tests.optimus.adversarial.graphs import Case, check

FILES = (layouts, numbers, layers, contexts, chains)
IN_BULK = (operands, writes, products, norms, sizes, returns, shrunk)
ALL_MODES = "OPTIMUS_ALL_MODES" in os.environ
EVERY = [p for file in FILES for p in file.graphs.params()]
EVERY += [p for file in IN_BULK for p in file.graphs.params() if ALL_MODES or not p.marks]


@pytest.mark.parametrize(("case", "mode"), EVERY)
def test_graph(case: Case, mode: str) -> None:
    check(case, mode)


def test_names_differ() -> None:
    names = [p.id for p in EVERY]
    assert len(set(names)) == len(names)


def test_infinity_through_a_chain_of_linears() -> None:
    x = torch.randn(64, 4)
    x[3, 1] = float("inf")
    chain = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.Linear(12, 4))
    check_program(chain, (x,), "all", inner="eager")
