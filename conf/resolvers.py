"""What the YAML files cannot hold: values from the machine and from PIPELINE."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import ListConfig, OmegaConf

from optimus.ablation import case, cases
from optimus.pipeline import patterns_by_name


def default_knobs() -> dict[str, dict[str, Any]]:
    """Every pattern's knobs with their defaults: the config keys `optimus.knobs.PATTERN.KNOB`."""
    return {
        name: {field.name: _plain(getattr(pattern, field.name)) for field in _fields(pattern)}
        for name, pattern in patterns_by_name().items()
        if _fields(pattern)
    }


def changed_knobs(knobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of `knobs` that differ from their defaults."""
    defaults = default_knobs()
    changed = {
        pattern: {k: v for k, v in values.items() if v != defaults.get(pattern, {}).get(k)}
        for pattern, values in knobs.items()
    }
    return {pattern: values for pattern, values in changed.items() if values}


def register() -> None:
    """Make the resolvers and the knobs known to Hydra; before the configuration is composed."""
    OmegaConf.register_new_resolver("precision_for", _precision_for, replace=True)
    OmegaConf.register_new_resolver("workers_for", _workers_for, replace=True)
    OmegaConf.register_new_resolver("ablation_cases", _case_names, replace=True)
    OmegaConf.register_new_resolver("case_patterns", lambda name: case(name).patterns, replace=True)
    OmegaConf.register_new_resolver(
        "case_disable", lambda name: ListConfig(list(case(name).disable)), replace=True
    )
    ConfigStore.instance().store(
        group="optimus", name="knobs", node={"knobs": default_knobs()}, provider="optimus"
    )


def _precision_for(accelerator: str) -> str:
    """bf16-mixed on a GPU, fp32 elsewhere."""
    gpu = accelerator in {"gpu", "cuda"} or (accelerator == "auto" and torch.cuda.is_available())
    return "bf16-mixed" if gpu else "32-true"


def _workers_for(accelerator: str) -> int:
    """Loader processes: none on a CPU, whose cores have the model to train."""
    return 4 if _precision_for(accelerator) == "bf16-mixed" else 0


def _case_names(kind: str) -> str:
    return ",".join(c.name for c in cases(kind))


def _fields(pattern: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(pattern) if dataclasses.is_dataclass(pattern) else ()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | frozenset | set) else value
