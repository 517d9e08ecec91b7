"""What a multirun varies, as its command line and its sweep configuration say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def swept_keys(config: DictConfig) -> dict[str, int]:
    """Keys that a multirun gives several values, and how many; of a sweeper other than Hydra's own
    only those on the command line. `config` is that of the multirun or of one of its jobs."""
    parsed = OverridesParser.create().parse_overrides(list(_words(config)))
    last = {override.key_or_group: override for override in parsed}
    return {
        key: len(list(override.sweep_iterator()))
        for key, override in last.items()
        if override.is_discrete_sweep()
    }


def num_jobs(config: DictConfig) -> int | None:
    """How many jobs a multirun has; None where its sweeper decides while it goes."""
    if config.hydra.sweeper._target_ != BASIC:
        return None
    return math.prod(swept_keys(config).values())


def _words(config: DictConfig) -> Iterator[str]:
    if config.hydra.sweeper._target_ == BASIC:
        params: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
        for key, values in (params.get("params") or {}).items():
            yield f"{key}={values}"
    yield from config.hydra.overrides.task
