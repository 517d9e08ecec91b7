"""One run a folder: two at once would mix their logs and overwrite each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any

from hydra.experimental.callback import Callback
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from conf.checks import UserError

_held: list[IO[str]] = []


class OneRunAFolder(Callback):
    """Hydra callback: refuses a run or multirun, before anything is written, whose folder is
    another's that still runs."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Raise UserError if a run writes to hydra.run.dir. Further ranks of a run may."""
        if getattr(rank_zero_only, "rank", 0) == 0 and os.environ.get("NODE_RANK", "0") == "0":
            hold(Path(config.hydra.run.dir), "run")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Raise UserError if a multirun writes to hydra.sweep.dir."""
        hold(Path(config.hydra.sweep.dir), "sweep")


def hold(folder: Path, kind: str) -> None:
    """Lock `folder` for a `kind`, "run" or "sweep", until this process ends, however it does.

    Raises UserError when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f".{kind}.lock").open("a")
    try:
        # Not flock, whose lock the workers of a killed run would hold on to: they are forked.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UserError(
            f"another run is writing to {folder.absolute()}: wait for its end, or give this one a "
            f"folder of its own (hydra.{kind}.dir=FOLDER)"
        ) from error
    except OSError:  # a file system without locks
        pass
    _held.append(file)
