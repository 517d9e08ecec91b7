"""Every shipped configuration composes, and every one whose data are at hand trains and tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from conf import build, checks, resolvers
from conf.checks import CONF, UserError, check, group_options
from optimus.ablation import KINDS, cases
from train import train

OPTIONS = group_options()
# One step each; tables and layers small enough to make in no time. What generated code computes is
# not the subject: the rewritten graph is run as it is.
QUICK = (
    "trainer.fast_dev_run=true",
    "trainer.accelerator=cpu",
    "optimus.inner=eager",
    "~callbacks.progress_bar",
    "trainer.enable_model_summary=false",
)
SMALL = (
    "data.train_rows=256",
    "data.val_rows=64",
    "data.test_rows=64",
    "data.max_rows_per_table=50",
    "data.batch_size=64",
    "data.eval_batch_size=64",
)

# Meant for a GPU: layers no larger than this test needs.
SMALLER = {
    "rankmixer_100m_synthetic": ["model.token_dim=64"],
    "wukong_large_synthetic": ["model.embedding_dim=16"],
}


def composed(folder: Path, *overrides: str) -> DictConfig:
    """The configuration as train.py composes it, with its output in `folder`."""
    resolvers.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[f"paths.output='{folder}'", *overrides])


def run(folder: Path, *overrides: str) -> dict[str, float]:
    """Train in this process, with nothing compiled before."""
    torch._dynamo.reset()
    metrics: dict[str, float] = {}
    train(composed(folder, *QUICK, *SMALL, *overrides), metrics)
    return metrics


@pytest.mark.parametrize("model", OPTIONS["model"])
def test_every_model_trains(tmp_path: Path, model: str) -> None:
    metrics = run(tmp_path, f"model={model}")
    assert metrics["test/num_samples"] == 64
    assert metrics["test/logloss"] > 0


@pytest.fixture
def _uncompiled() -> Iterator[None]:
    """Where what is compiled is not the subject."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("logger", OPTIONS["logger"])
def test_every_logger_writes(tmp_path: Path, logger: str) -> None:
    # fast_dev_run would replace the loggers.
    run(tmp_path, f"logger={logger}", "trainer.fast_dev_run=false", "trainer.log_every_n_steps=1")
    expected = {"csv": ["csv"], "tensorboard": ["tensorboard"], "all": ["csv", "tensorboard"]}
    for folder in expected[logger]:
        assert any((tmp_path / folder).iterdir())


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("trainer", [name for name in OPTIONS["trainer"] if name != "gpu"])
def test_every_trainer_runs(tmp_path: Path, trainer: str) -> None:
    devices = ["trainer.devices=1", "trainer.accelerator=cpu"]
    assert run(tmp_path, f"trainer={trainer}", *devices)["test/num_samples"] == 64


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("callbacks", OPTIONS["callbacks"])
def test_every_set_of_callbacks_runs(tmp_path: Path, callbacks: str) -> None:
    run(tmp_path, f"callbacks={callbacks}", "trainer.fast_dev_run=false")
    assert {f.name for f in (tmp_path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_what_the_trainer_is_told_to_do_without(tmp_path: Path) -> None:
    switches = ("enable_progress_bar", "enable_checkpointing", "fast_dev_run")
    run(
        tmp_path,
        "~logger",
        "test=false",
        "metric=val/auc",
        *(f"trainer.{switch}=false" for switch in switches),
    )
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("experiment", OPTIONS["experiment"])
def test_every_experiment_on_synthetic_data_trains(tmp_path: Path, experiment: str) -> None:
    if not str(composed(tmp_path, f"experiment={experiment}").data._target_).endswith("Synthetic"):
        pytest.skip("its data are fetched or given by the user: tests/recsys/data has their tests")
    # Its model is compiled above, with all patterns.
    run(tmp_path, f"experiment={experiment}", *SMALLER.get(experiment, ()))


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in OPTIONS for name in OPTIONS[group]]
)
def test_every_option_composes_and_resolves(tmp_path: Path, group: str, name: str) -> None:
    reads_files = name == "criteo" or (group == "experiment" and "criteo" in name)
    given = ["data.path=somewhere"] if reads_files else []
    cfg = composed(tmp_path, f"{group}={name}", *given)
    OmegaConf.to_container(cfg, resolve=True)
    checks.check(cfg)


def test_a_checkpoint_of_another_model_or_other_data_is_refused(tmp_path: Path) -> None:
    checkpoint, hydra = tmp_path / "checkpoints" / "last.ckpt", tmp_path / ".hydra"
    for folder in (checkpoint.parent, hydra):
        folder.mkdir()
    checkpoint.touch()
    given = ["model=mmoe", "data.train_rows=10"]
    OmegaConf.save(composed(tmp_path, *given), hydra / "config.yaml")
    OmegaConf.save(given, hydra / "overrides.yaml")
    resume = f"resume='{checkpoint}'"
    with pytest.raises(UserError, match=r"started with: model=mmoe data\.train_rows=10; give the"):
        build.resume_path(composed(tmp_path, resume))
    with pytest.raises(UserError, match="another model"):
        build.resume_path(composed(tmp_path, resume, "model=mmoe", "model.num_experts=2"))
    # Longer training and other settings of it are what people resume for.
    cfg = composed(tmp_path, resume, "model=mmoe", "data.train_rows=20", "trainer.max_epochs=9")
    assert build.resume_path(cfg) == checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_every_sweep_runs_the_cases_of_the_pipeline(tmp_path: Path, kind: str) -> None:
    given = ("experiment=mmoe_small", f"sweep={kind}")
    last = cases(kind)[-1].name
    assert composed(tmp_path, *given, f"case={last}").case == last
    cfg = composed(tmp_path, *given)
    for case in cases(kind):
        cfg.case = case.name
        assert cfg.optimus.patterns == case.patterns
        assert tuple(cfg.optimus.disable) == case.disable


def test_each_sweep_is_an_ablation() -> None:
    assert sorted(OPTIONS["sweep"]) == sorted(KINDS)


@pytest.mark.parametrize("key", ["sparse_optimizer", "dense_optimizer"])
def test_optimizer_keys_are_those_of_the_optimizers(tmp_path: Path, key: str) -> None:
    from recsys.optim import OptimizerConfig

    assert set(composed(tmp_path)[key]) == set(OptimizerConfig.__dataclass_fields__)


def test_optimus_keys_are_those_of_the_callback(tmp_path: Path) -> None:
    from inspect import signature

    from optimus.callback import OptimusCallback

    keys = set(composed(tmp_path).optimus) - {"_target_"}
    assert keys == set(signature(OptimusCallback.__init__).parameters) - {"self"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "sparse_optimizer.name=adagrd",
            "sparse_optimizer.name: unknown optimizer 'adagrd', did you mean adagrad",
        ),
        ("dense_optimizer.name=rowwise_adagrad", "dense_optimizer.name: unknown optimizer"),
        ("dense_optimizer.lr=0", "dense_optimizer: adam: lr is 0, must be above 0"),
        ("dense_optimizer.lr=high", "dense_optimizer.lr is 'high', must be a number"),
        ("trainer.max_steps=abc", "trainer.max_steps is 'abc', must be a whole number"),
        ("data.batch_size=abc", "data.batch_size is 'abc', must be a whole number"),
        ("resume=lastt", "resume=lastt: no checkpoint there; did you mean last?"),
        ("data.batch_size=0", "batch_size is 0, must be at least 1"),
        ("resume=nowhere/run", "resume=nowhere/run: no checkpoint there"),
        ("test=false", "set metric=val/auc"),
        ("data=criteo", "data.path is not given, add data.path=...: give Criteo's train.txt"),
        ("trainer.accelerator=tpuu", "tpuu"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, override: str, expected: str
) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        train(composed(tmp_path, override), {})
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_data_set_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.txt"):
        train(composed(tmp_path, "data=criteo", f"data.path={tmp_path}/missing.txt"), {})


def test_nothing_is_set_up_for_an_optimizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sparse_optimizer"):
        check(composed(tmp_path, "sparse_optimizer.name=adagrd"))


def test_fewer_rows_than_a_batch_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^train\.py: 10 training rows do not fill one batch"):
        train(composed(tmp_path, *QUICK, *SMALL, "data.train_rows=10", "data.batch_size=16"), {})


def test_train_py_is_short() -> None:
    assert len((CONF.parent / "train.py").read_text().splitlines()) < 80
