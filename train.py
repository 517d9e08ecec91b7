"""Train a recommender with Optimus in the loop: python train.py [KEY=VALUE ...], see conf/."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig

from conf import build, checks, jobs, resolvers


def train(cfg: DictConfig) -> dict[str, float]:
    """Train, validate and test as `cfg` says; the last value of every metric logged."""
    checks.check(cfg)
    resume = build.resume_path(cfg)
    seed_everything(cfg.seed, workers=True, verbose=False)
    trainer = build.build_trainer(cfg)
    datamodule = build.build_datamodule(cfg)
    module = build.build_module(cfg, datamodule)
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume)
    metrics = logged(trainer)
    if cfg.test:
        best = trainer.checkpoint_callback and trainer.checkpoint_callback.best_model_path
        trainer.test(module, datamodule=datamodule, ckpt_path=best or None)
        metrics |= logged(trainer)
    return metrics


def logged(trainer: Trainer) -> dict[str, float]:
    """Metrics as plain numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """One run; of a multirun each job is a run in a process of its own. Returns `cfg.metric`."""
    if jobs.in_multirun():
        return jobs.run_in_own_process(Path(__file__), cfg.metric)
    with jobs.recorded(Path(cfg.paths.output)) as result:
        result.metrics = train(cfg)
    return result.metric(cfg.metric)


if __name__ == "__main__":
    resolvers.register()
    checks.check_command_line(sys.argv[1:])
    main()
