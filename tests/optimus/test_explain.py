"""`explain=`: what fired where, what was missed and why, what is needed, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

import optimus
from optimus.backend import OptimusBackend
from optimus.callback import OptimusCallback
from optimus.explain import write_explanations
from tests.optimus.test_lookup import Lit
from tests.optimus.user_patterns import CancelDoubleNegation, ComputesSomethingElse, registered


class Towers(nn.Module):
    """Towers on slices and one layer that has no company."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))
        self.over = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        towers = enumerate(self.towers)
        done = [torch.relu(tower(x[:, 8 * i : 8 * i + 8])) for i, tower in towers]
        return self.over(torch.cat(done, 1))


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def explained(explain: Any, model: nn.Module | None = None, **options: Any) -> OptimusBackend:
    backend = OptimusBackend(inner="eager", explain=explain, **options)
    torch.compile(model or Towers(), backend=backend)(torch.randn(5, 32))
    return backend


def test_what_fired_and_what_was_missed() -> None:
    text = explained("batch_linears").report.explain("batch_linears")
    assert "Run linears with inputs and weights of their own" in text
    assert "batch_linears: 5 anchors, fired 1" in text
    assert f"1 fired   4 nodes each at {__file__}:" in text
    assert "1 missed  no other node like it can run beside it" in text
    assert "e.g. linear_4, " in text and "return self.over(torch.cat(done, 1))" in text
    before, after = text.split("before, as captured")[1].split("after all patterns")
    taken = [line.split(":")[0] for line in before.splitlines() if line.startswith("- ")]
    assert taken == ["- linear"] and "... 3 more times these 3 lines" in before
    assert "+ baddbmm: f32[4, 5, 4] = baddbmm(" in after
    assert "linear_4: f32[5, 3] = linear(" in after


class Products(nn.Module):
    """Linears of one input, written as matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(32, 3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(x @ weight) for weight in self.weights], 1)


def test_what_a_starved_pattern_needs() -> None:
    name = "widen_shared_input_linears"
    options: dict[str, Any] = {"disable": ["lower_matmul_to_linear", "merge_duplicates"]}
    text = explained(name, Products(), **options).report.explain(name)
    needs = "needs lower_matmul_to_linear, not selected; with that it fires 1 times"
    assert f"fired 0: {needs}" in text
    assert "fired 0" not in explained(name, Products()).report.explain(name)


def test_a_pattern_that_is_not_selected() -> None:
    text = explained("batch_linears", patterns="none").report.explain("batch_linears")
    assert "it is not selected" in text
    assert "selected as well, it would fire 1 times" in text
    assert "the graph runs as it was captured" in text


def test_nothing_would_help() -> None:
    text = explained("batch_batch_norms").report.explain("batch_batch_norms")
    assert "fired 0: selecting more patterns would not make it fire" in text


@dataclass(frozen=True)
class NeedsAnother(CancelDoubleNegation):
    anchors = ("tan",)
    needs = ("merge_reshapes", "batch_linears")


def test_declared_needs_are_reported_when_it_never_fires() -> None:
    with registered(NeedsAnother()) as name:
        starved = explained(None, patterns=[name, "batch_linears"]).report
        assert f"{name}: 0 anchors, fired 0: needs merge_reshapes, not selected" in str(starved)
        assert "needs merge_reshapes, not selected" in starved.table()
        assert "needs" not in explained(None).report.table()


def test_a_pattern_that_was_left_out() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.neg(x).sin()

    with registered(ComputesSomethingElse()) as name:
        text = explained(name, Model()).report.explain(name)
        assert "it is left out, it changed the result: " in text


def test_names() -> None:
    assert explained("batch_linear").report.explain("batch_linears")
    with pytest.raises(ValueError, match="nearest valid: batch_linears"):
        OptimusBackend(explain=["batch_lineers"])
    with pytest.raises(ValueError, match="nearest valid: batch_linears"):
        OptimusCallback(explain="batch_lineers")
    with pytest.raises(ValueError, match=r"compile with explain='remove_noops' \(known: none\)"):
        explained(None).report.explain("remove_noops")


def files(folder: Path) -> Sequence[str]:
    return sorted(file.name for file in folder.iterdir() if "explain" in file.name)


def test_files_are_written_where_asked_for_only(tmp_path: Path) -> None:
    write_explanations(explained(None).report, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    report = explained(["batch_linears", "remove_noops"]).report
    write_explanations(report, tmp_path / "two")
    assert files(tmp_path / "two") == [
        "optimus_explain_batch_linears.txt",
        "optimus_explain_batch_linears_0.svg",
        "optimus_explain_remove_noops.txt",
        "optimus_explain_remove_noops_0.svg",
    ]


@pytest.mark.parametrize("explain", [None, "batch_linears"])
def test_files_of_a_run_lie_beside_its_summary(tmp_path: Path, explain: str | None) -> None:
    callback = OptimusCallback(
        baseline_steps=1, inner="eager", explain=explain, summary_dir=tmp_path
    )
    trainer = Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.randn(12, 24), batch_size=4))
    assert (tmp_path / "optimus_summary.json").exists()
    if explain is None:
        assert not files(tmp_path)
    else:
        assert "optimus_explain_batch_linears.txt" in files(tmp_path)
        assert optimus.report(callback).explain("batch_linears")
