"""Train a recommender with Optimus in the loop: python train.py [KEY=VALUE ...], see conf/."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__" and "torch" not in sys.modules and not int(os.getenv("LOCAL_RANK", "0")):
    # The imports take seconds, on some machines half a minute.
    print("Optimus: loading PyTorch, TorchRec and Lightning ...", file=sys.stderr, flush=True)

import hydra
from hydra.errors import HydraException
from lightning.pytorch import seed_everything
from omegaconf import DictConfig

from conf import build, checks, jobs, resolvers, unfired
from recsys.data.plan import TooFewRows
from recsys.lookup import NotFusible
from recsys.module import NonFiniteError


def train(cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Train, validate and test as `cfg` says; `metrics` gets the last value of every one logged,
    also where this raises."""
    checks.check(cfg)
    resume = build.resume_path(cfg)
    with checks.told(ValueError, TypeError, OSError, HydraException):
        seed_everything(cfg.seed, workers=True, verbose=False)
        trainer = build.build_trainer(cfg)
        datamodule = build.build_datamodule(cfg)
        module = build.build_module(cfg, datamodule)
    with checks.told(OSError, NonFiniteError, NotFusible, TooFewRows):
        with build.logged(trainer, metrics):
            trainer.fit(module, datamodule=datamodule, ckpt_path=resume)
        if cfg.test:
            with build.logged(trainer, metrics):
                trainer.test(module, datamodule=datamodule, ckpt_path=build.best_path(trainer))


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """One run; of a multirun each job is a run in a process of its own. Returns `cfg.metric`."""
    if jobs.in_multirun():
        known = unfired.known_result(cfg)
        return jobs.run_in_own_process(Path(__file__), cfg.metric, known)
    with jobs.recorded(Path(cfg.paths.output)) as result:
        train(cfg, result.metrics)
    return result.metric(cfg.metric)


if __name__ == "__main__":
    with checks.told(ValueError):
        resolvers.register()
    checks.check_command_line(sys.argv[1:])
    main()
