"""Patterns of users: registered, placed, refused; and broken ones never stop a program."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

import optimus
from conf import resolvers
from optimus.ablation import cases
from optimus.backend import OptimusBackend
from optimus.callback import OptimusCallback
from optimus.driver import Phase
from optimus.pattern import Rewrite
from optimus.pipeline import PIPELINE, patterns_by_name, phases, select
from optimus.registry import Place, placed
from optimus.testing import check_pattern
from tests import processes
from tests.optimus.test_lookup import Lit
from tests.optimus.user_patterns import (
    Broken,
    CancelDoubleNegation,
    ComputesSomethingElse,
    GroupsRaise,
    Negated,
    NeverEnds,
    RaisesInMatch,
    RaisesInRewrite,
    WritesToTheGraph,
    registered,
)

NAME = "cancel_double_negation"


def test_a_registered_pattern_takes_part_everywhere() -> None:
    assert NAME not in select("all").names
    with registered(CancelDoubleNegation()):
        assert NAME in select("all").names
        assert NAME in select("vertical").names
        assert NAME in select(NAME).names
        assert NAME not in select("all", disable=[NAME]).names
        assert NAME in {name for case in cases("leave_one_out") for name in case.disable}
        assert resolvers.default_knobs()[NAME] == {"only_relu": False}
        report = run("all", knobs={NAME: {"only_relu": True}})
        assert report.fired(NAME) == 1
        assert run(NAME).fired(NAME) == 2
    assert NAME not in select("all").names
    assert phases() == PIPELINE


def run(patterns: str = "all", **options: Any) -> Any:
    """The report on a program with two double negations; asserts that it computes the same."""
    torch._dynamo.reset()
    backend = OptimusBackend(patterns, inner="eager", **options)
    module, x = Negated(), torch.randn(3, 4, requires_grad=True)
    expected, actual = module(x), torch.compile(module, backend=backend)(x)
    assert torch.equal(expected, actual)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    (actual_grad,) = torch.autograd.grad(actual.sum(), x)
    torch.testing.assert_close(actual_grad, expected_grad)
    return backend.report


@pytest.mark.parametrize("name", [NAME, "batch_linears"])
def test_a_pattern_is_not_registered_twice(name: str) -> None:
    with registered(CancelDoubleNegation()):
        pattern = patterns_by_name()[name]
        with pytest.raises(ValueError, match=f"a pattern '{name}' already"):
            optimus.register(pattern)


@pytest.mark.parametrize(
    ("pattern", "kind", "words"),
    [
        (CancelDoubleNegation, TypeError, r"give an instance, CancelDoubleNegation\(\)"),
        (lambda graph: graph, TypeError, "not function"),
        (
            type("D", (CancelDoubleNegation,), {"__dataclass_params__": None})(),
            TypeError,
            "frozen",
        ),
        (type("A", (CancelDoubleNegation,), {"anchors": ("negg",)})(), ValueError, "valid: neg"),
        (type("B", (CancelDoubleNegation,), {"anchors": "neg"})(), TypeError, "a tuple"),
        (type("C", (CancelDoubleNegation,), {"family": "vertcal"})(), ValueError, "vertical"),
        (type("All", (CancelDoubleNegation,), {})(), ValueError, "has a meaning"),
        (type("BatchLinear", (CancelDoubleNegation,), {})(), ValueError, "has a meaning"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        optimus.register(pattern)
    assert phases() == PIPELINE


def names(arranged: tuple[Phase, ...], phase: str) -> list[str]:
    return [p.name() for each in arranged if each.name == phase for p in each.patterns]


def test_places() -> None:
    pattern: Rewrite = CancelDoubleNegation()
    assert names(placed(pattern, Place(), PIPELINE), "vertical")[-1] == NAME
    assert names(placed(pattern, Place(phase="finish"), PIPELINE), "finish")[-1] == NAME
    first = names(placed(pattern, Place(before="batch_linears"), PIPELINE), "horizontal")
    assert first[first.index("batch_linears") - 1] == NAME
    between = Place(after="remove_noops", before="merge_duplicates")
    assert names(placed(pattern, between, PIPELINE), "vertical")[1] == NAME
    assert names(placed(pattern, Place(after="remove_noops"), PIPELINE), "vertical")[-1] == NAME


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(phase="vertcal"), "nearest valid: vertical"),
        (Place(before="batch_linear"), "nearest valid: batch_linears"),
        (Place(phase="vertical", after="batch_linears"), "more than one phase"),
        (Place(before="remove_noops", after="merge_duplicates"), "does not stand in front"),
    ],
)
def test_places_that_there_are_not(place: Place, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        placed(CancelDoubleNegation(), place, PIPELINE)


def test_only_registered_patterns_are_unregistered() -> None:
    with pytest.raises(ValueError, match="registered are: none"):
        optimus.unregister("batch_linears")


def test_the_suite_runs_on_a_pattern_that_is_not_registered() -> None:
    check_pattern(CancelDoubleNegation())
    with pytest.raises(AssertionError, match="fired 1 times instead of 2"):
        check_pattern(CancelDoubleNegation(only_relu=True))
    with pytest.raises(AssertionError):
        check_pattern(ComputesSomethingElse())
    with pytest.raises(TypeError, match="give an instance"):
        check_pattern(CancelDoubleNegation)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pattern", [RaisesInMatch(), RaisesInRewrite(), GroupsRaise()], ids=lambda p: p.name()
)
def test_a_pattern_that_raises_is_left_out_and_named(pattern: Rewrite) -> None:
    with registered(pattern) as name, registered(CancelDoubleNegation()):
        report = run()
        (record,) = [p for p in report.graphs[0].patterns if p.name == name]
        assert record.fired == 0
        assert "I am broken" in next(iter(record.misses))
        assert report.fired(NAME) == 2


def test_a_pattern_that_changes_the_result_is_left_out_and_named() -> None:
    with (
        registered(ComputesSomethingElse()) as name,
        registered(CancelDoubleNegation(), before=name),
    ):
        graph = run().graphs[0]
        assert list(graph.dropped) == [name]
        assert graph.verified == "verified" and not graph.fallback
        assert graph.fired >= 2


def test_a_pattern_that_breaks_the_graph_is_left_out_and_named() -> None:
    with registered(WritesToTheGraph()) as name, registered(CancelDoubleNegation()):
        report = run()
        assert list(report.graphs[0].broken) == [name]
        assert not report.graphs[0].fallback
        assert report.fired(NAME) == 2
        assert f"{name} is left out, it broke the graph" in report.table()


def test_a_pattern_that_never_ends_is_stopped() -> None:
    with registered(NeverEnds()) as name:
        assert "nodes became" in run().graphs[0].broken[name]


def test_wrong_patterns_are_found_where_one_ends_by_the_other_alone() -> None:
    """Looked for one by one, the first never ends."""
    with registered(NeverEnds()) as endless, registered(ComputesSomethingElse()) as wrong:
        graph = run().graphs[0]
        assert set(graph.left_out) == {endless, wrong}
        assert graph.verified == "verified" and not graph.fallback


def test_broken_patterns_are_named_whatever_else_is_selected() -> None:
    with registered(Broken(), phase="normalize"), registered(ComputesSomethingElse()) as name:
        assert set(run().graphs[0].dropped) == {"broken", name}


class NegatingLit(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(24, 4), Negated())


def test_training_goes_on_with_broken_patterns(tmp_path: Path) -> None:
    torch._dynamo.reset()
    trainer = Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    data = torch.utils.data.DataLoader(torch.randn(12, 24), batch_size=4)
    names = ["raises_in_match", "writes_to_the_graph", "computes_something_else"]
    with contextlib.ExitStack() as stack:
        for pattern in (RaisesInMatch(), WritesToTheGraph(), ComputesSomethingElse()):
            stack.enter_context(registered(pattern))
        callback = OptimusCallback(baseline_steps=1, inner="eager", summary_dir=tmp_path)
        trainer.callbacks.append(callback)
        trainer.fit(NegatingLit(), data)
    assert trainer.global_step == 3
    (graph,) = optimus.report(callback).graphs
    assert (list(graph.broken), list(graph.dropped)) == (names[1:2], names[2:])
    assert not graph.fallback and graph.verified == "verified"


ENTRY_POINTS = """\
[optimus.patterns]
good = theirs:CancelDoubleNegation
placed = theirs:add_another
absent = theirs:nothing_there
"""
PACKAGE = """\
import optimus
from tests.optimus.user_patterns import CancelDoubleNegation

class CancelThem(CancelDoubleNegation):
    pass

def add_another():
    optimus.register(CancelThem(), before="batch_linears")
"""


def test_entry_points(tmp_path: Path) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "theirs.py").write_text(PACKAGE)
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parents[2])!r}]\n"
        "import optimus, logging; logging.basicConfig()\n"
        "names = optimus.select('all').names\n"
        "assert 'cancel_double_negation' in names\n"
        "assert names.index('cancel_them') + 1 == names.index('batch_linears')\n"
    )
    done = processes.run([sys.executable, "-c", program], forked=True)
    assert done.returncode == 0, done.stderr
    assert "entry point theirs:nothing_there is left out" in done.stderr


def with_files(files: str) -> subprocess.CompletedProcess[str]:
    """The names of all patterns, printed by a process that has `files` in its environment."""
    program = "import optimus; print(*optimus.pattern_names())"
    return processes.run([sys.executable, "-c", program], forked=True, OPTIMUS_PATTERNS=files)


def test_files_that_the_environment_names(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(PACKAGE + "\nadd_another()\n")
    done = with_files(str(mine))
    assert done.returncode == 0, done.stderr
    assert "cancel_them" in done.stdout.split()

    done = with_files(f"{mine},{tmp_path / 'absent.py'}")
    assert "OPTIMUS_PATTERNS names" in done.stderr and "absent.py" in done.stderr
