"""Checkpoint files that are complete or not there at all, also when the disk fills up."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

_SUFFIX = ".ckpt"


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the message names the last good one."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush to disk, then rename over it.

    Lightning's own writer collects the file in memory, writes it to the system's temporary folder
    and moves it: across two file systems that is a copy onto the target, and a disk that fills up
    meanwhile leaves a truncated file where the last good checkpoint may have been. Addresses that
    are not local paths (s3://...) go to Lightning's writer.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Raises CheckpointWriteError, and leaves what was at `path`, when the write fails."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path).absolute()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _beside(target) as temporary:
                _write(checkpoint, temporary)
                temporary.replace(target)
        except (OSError, RuntimeError) as error:
            cause = _os_error(error)
            if cause is None:
                raise
            raise CheckpointWriteError(_explain(target, cause)) from error


def write_atomically(trainer: Trainer) -> None:
    """Let `trainer` write its checkpoints so, unless it was given a writer of the user's own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Path of a new file in the folder of `target`, removed at the end if it is still there."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    # mkstemp makes files private; a checkpoint has the rights any new file would have.
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def _os_error(error: BaseException | None) -> OSError | None:
    """The failed write behind `error`: PyTorch's zip writer makes a RuntimeError of some."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _explain(target: Path, error: OSError) -> str:
    try:
        free = f"{shutil.disk_usage(target.parent).free / 2**20:.0f} MiB free there"
    except OSError:
        free = "the folder cannot be read"
    kept = last_good(target.parent)
    return (
        f"checkpoint {target} could not be written: {error} ({free}). "
        + (f"The last good checkpoint is {kept}. " if kept else "There is no earlier one. ")
        + "Free space or set another folder, then resume."
    )


def last_good(*folders: Path) -> Path | None:
    """The newest checkpoint in `folders`: files there are complete, see AtomicCheckpointIO."""
    files = [file for folder in folders for file in folder.glob(f"*{_SUFFIX}") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def last_good_of(trainer: Trainer) -> Path | None:
    """The newest checkpoint where the trainer's callbacks write them."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return last_good(*(Path(c.dirpath) for c in callbacks if c.dirpath))
