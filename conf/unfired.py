"""Leave-one-out jobs that need no run: leaving out a pattern that never fires changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from conf.jobs import RESULT, Result
from optimus.ablation import case
from optimus.summary import FILE_STEM

_CASE = "case="
_ALL = f"{_CASE}all"


def known_result(cfg: DictConfig) -> Result | None:
    """The result of the current job of a multirun, where that of `case=all` is it; else None.

    That is so when the job leaves out one pattern that fired nowhere in the run of all patterns
    with the same other overrides. Only where the configuration asks for it by `skip_unfired`.
    """
    if not cfg.get("skip_unfired"):
        return None
    job = HydraConfig.get()
    return unfired_result(Path(job.sweep.dir), list(job.overrides.task), cfg.case)


def unfired_result(folder: Path, overrides: Iterable[str], case_name: str) -> Result | None:
    """As `known_result`, for the job `case_name` of `overrides` in the multirun in `folder`."""
    disabled = case(case_name).disable
    if len(disabled) != 1:
        return None
    found = _run_of_all(folder, {_ALL if o.startswith(_CASE) else o for o in overrides})
    if found is None or _fired(found[1], disabled[0]):
        return None
    return replace(found[0], seconds=0.0, same_as=found[0].job)


def _run_of_all(folder: Path, overrides: set[str]) -> tuple[Result, dict[str, Any]] | None:
    """The run with `overrides` that ended well, and its summary."""
    for path in folder.rglob(RESULT):
        result = Result.read(path.parent)
        if result and not result.error and set(result.overrides) == overrides:
            try:
                return result, json.loads((path.parent / f"{FILE_STEM}.json").read_text())
            except (OSError, ValueError):
                return None
    return None


def _fired(summary: dict[str, Any], pattern: str) -> bool:
    """Whether the pattern changed a graph; of one that the summary does not know, assume so."""
    counts = {row["name"]: row["fired"] for row in summary.get("patterns", ())}
    return bool(counts.get(pattern, True))
