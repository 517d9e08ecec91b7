"""What cannot work is refused before any work, naming the nearest valid names."""

from __future__ import annotations

import pytest

from conf import resolvers
from conf.checks import UserError, check_command_line, group_options, nearest
from optimus.pipeline import pattern_names


@pytest.fixture(autouse=True)
def _registered() -> None:
    resolvers.register()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("model=dlmr", "unknown model 'dlmr': did you mean dlrm"),
        ("model=dlrm,dlrm_dcn2", "unknown model 'dlrm_dcn2': did you mean dlrm_dcnv2"),
        ("data=movielens", "unknown data 'movielens': did you mean movielens_1"),
        ("sweep=leave_one", "unknown sweep 'leave_one': did you mean leave_one_out"),
        ("sed=3", "unknown key 'sed': did you mean seed"),
        ("trainer.max_epoch=3", "unknown key 'trainer.max_epoch': did you mean trainer.max_epochs"),
        ("optimus.patern=all", "did you mean optimus.patterns"),
        ("optimus.patterns=horizontl", "nearest valid: horizontal"),
        ("optimus.patterns=none,vertical,horizontl", "nearest valid: horizontal"),
        (f"optimus.patterns=[{pattern_names()[0]}x]", pattern_names()[0]),
        (f"optimus.disable=[{pattern_names()[0]}x]", pattern_names()[0]),
        ("optimus.explain=batch_lineers", "nearest valid: batch_linears"),
        ("optimus.explain=[batch_linears,cancel_catsplit]", "nearest valid: cancel_cat_split"),
        ("seed=[1", "train.py: "),
        (
            "optimus.knobs.pad_gemms.gates=never",
            "pattern 'pad_gemms' has no knob 'gates': did you mean gate? "
            "(valid: gate, least, multiple)",
        ),
        ("optimus.knobs.pad_gemm.gate=never", "did you mean pad_gemms?"),
        ("optimus.knobs.merge_reshapes.x=1", "'merge_reshapes' has no knobs"),
    ],
)
def test_refused(argument: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        check_command_line(["-m", argument])
    assert expected in str(error.value)


def test_unknown_case_of_a_sweep() -> None:
    with pytest.raises(UserError, match="nearest valid: without_"):
        check_command_line(["sweep=leave_one_out", f"case=witout_{pattern_names()[0]}"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-m", "optimus.patterns=none,vertical,horizontal,all", "seed=1,2"],
        [f"optimus.patterns={pattern_names()[0]},[{pattern_names()[0]},vertical]"],
        [f"optimus.disable=[{pattern_names()[0]}]", "model.embedding_dim=8"],
        ["optimus.explain=batch_linears", "optimus.patterns=[batch_linear,split_cat_pass]"],
        ["optimus.explain=[batch_linears,cancel_cat_split]", "optimus.disable=[batch_relu]"],
        ["sweep=leave_one_out", "case=all"],
        ["optimus.knobs.pad_gemms.gate=never", "optimus.knobs.batch_linears={copy_inputs: false}"],
        ["+trainer.limit_predict_batches=3", "~sweep", "hydra.run.dir=/tmp/x"],
        ["model=dlrm,dlrm_dcnv2", "seed=range(1,4)"],
        ["--config-dir=/somewhere", "model=mine", "model.my_key=3"],
    ],
)
def test_accepted(arguments: list[str]) -> None:
    check_command_line(arguments)


def test_every_group_of_the_issue_has_options() -> None:
    options = group_options()
    for group in ("model", "data", "optimus", "trainer", "logger", "callbacks", "sweep"):
        assert options[group], group


def test_nearest_lists_all_when_nothing_is_near() -> None:
    assert nearest("zzz", ["a", "b"]) == "(valid: a, b)"
    assert nearest("zzz", ["a", "b"], everything=False) == ""
