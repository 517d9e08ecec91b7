"""Objects from the configuration, and its paths checked."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from omegaconf import DictConfig, OmegaConf

from conf.checks import UserError
from conf.resolvers import changed_knobs
from recsys.checkpoint import last_good
from recsys.module import RecModule
from recsys.profile import NoProfiler, ProfileSteps


def build_module(cfg: DictConfig, datamodule: Any) -> RecModule:
    """The model for the data module's schema, with its optimizers."""
    return RecModule(
        instantiate(cfg.model),
        datamodule.schema,
        sparse_optimizer=_plain(cfg.sparse_optimizer),
        dense_optimizer=_plain(cfg.dense_optimizer),
        task_weights=_plain(cfg.task_weights),
        sparse_arch=cfg.sparse_arch,
    )


def build_datamodule(cfg: DictConfig) -> LightningDataModule:
    """The data module, its data prepared so far that the schema is known."""
    datamodule: LightningDataModule = instantiate(cfg.data)
    # The ranks of a distributed run come here one by one; those behind the first find all done.
    with FileLock(_lock_for(Path(cfg.paths.data))):
        datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule


def build_trainer(cfg: DictConfig) -> Trainer:
    """The trainer with its loggers and callbacks, Optimus among them."""
    # Lightning's own use of a PyTorch function; nothing a user could change.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    loggers = [instantiate(logger) for logger in _entries(cfg.get("logger"))]
    made = [instantiate(callback) for callback in _entries(cfg.get("callbacks"))]
    callbacks: list[Callback] = [c for c in made if _is_wanted(c, cfg.trainer, bool(loggers))]
    if cfg.optimus is not None:
        knobs = changed_knobs(_plain(cfg.optimus.knobs))
        callbacks.insert(0, instantiate(cfg.optimus, knobs=knobs, _convert_="all"))
    profiler = NoProfiler() if cfg.trainer.profiler is None else cfg.trainer.profiler
    return instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False, profiler=profiler)


def _is_wanted(callback: Callback, trainer: DictConfig, has_logger: bool) -> bool:
    """Whether it has something to do; the trainer refuses those that it is told to do without."""
    if isinstance(callback, ProfileSteps):  # Lightning asks every callback a dozen times a step
        return callback.num_steps > 0
    if isinstance(callback, ProgressBar):
        return trainer.enable_progress_bar
    if isinstance(callback, Checkpoint):
        return trainer.enable_checkpointing
    return has_logger or not isinstance(callback, LearningRateMonitor)


def resume_path(cfg: DictConfig) -> Path | None:
    """The checkpoint that `resume` names.

    Raises UserError naming the nearest if there is none, and if it is of a run with another model
    or other data, saying what that run was started with.
    """
    if cfg.resume is None:
        return None
    found = _checkpoint(cfg)
    _check_is_alike(cfg, found)
    return found


def _check_is_alike(cfg: DictConfig, checkpoint: Path) -> None:
    saved = _settings_of(checkpoint, "config.yaml")
    if saved is None:
        return
    theirs, ours = ([OmegaConf.to_container(c.model), c.data.get("_target_")] for c in (saved, cfg))
    if theirs != ours:
        given = " ".join(_settings_of(checkpoint, "overrides.yaml") or [])
        raise UserError(
            f"resume={cfg.resume}: {checkpoint} is of a run with another model or other data, "
            f"started with: {given or 'no arguments'}; give the same, besides resume"
        )


def _settings_of(checkpoint: Path, file: str) -> Any:
    """What Hydra wrote of the run that a checkpoint is of; None if that is not beside it."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        if (folder / ".hydra" / file).is_file():
            return OmegaConf.load(folder / ".hydra" / file)
    return None


def _checkpoint(cfg: DictConfig) -> Path:
    if cfg.resume == "last":
        runs = Path(cfg.paths.runs)
        found = last_good(*{file.parent for file in runs.rglob("*.ckpt")})
        if found is None:
            raise UserError(f"resume=last: no run in {runs.absolute()} has a checkpoint")
        return found
    path = Path(cfg.resume)
    if path.is_file():
        return path
    found = last_good(path, path / "checkpoints")
    if found is None:
        hint = "; did you mean last?" if difflib.get_close_matches(str(path), ["last"]) else ""
        near = hint or _nearest_checkpoints(cfg, path)
        raise UserError(f"resume={path}: no checkpoint there{near}")
    return found


def best_path(trainer: Trainer) -> str | None:
    """The best checkpoint of the run; None without one, as in a fast_dev_run."""
    callback = trainer.checkpoint_callback
    return getattr(callback, "best_model_path", None) or None


@contextlib.contextmanager
def logged(trainer: Trainer, metrics: dict[str, float]) -> Iterator[None]:
    """Put the last value of every metric that the block logs into `metrics`, also if it raises."""
    try:
        yield
    except BaseException:
        # Reading a device that has failed raises again: what ended the run is the error to show.
        with contextlib.suppress(Exception):
            metrics |= _last_values(trainer)
        raise
    metrics |= _last_values(trainer)


def _last_values(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _lock_for(folder: Path) -> Path:
    """A lock file outside `folder`, which is only made when there is something to put there."""
    digest = hashlib.sha1(str(folder.absolute()).encode(), usedforsecurity=False).hexdigest()
    return Path(tempfile.gettempdir()) / f"optimus-{os.getuid()}-{digest[:12]}.lock"


def _nearest_checkpoints(cfg: DictConfig, path: Path) -> str:
    known = [str(file) for file in Path(cfg.paths.runs).rglob("*.ckpt")]
    near = difflib.get_close_matches(str(path), known, n=3, cutoff=0.0)
    return f"; nearest: {', '.join(near)}" if near else ""


def _entries(group: DictConfig | None) -> list[DictConfig]:
    return [entry for entry in (group or {}).values() if entry is not None]


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
