"""Refuse words where a number must be: what takes them would only say that it cannot compare."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from hydra.utils import get_object

from recsys.data.datamodule import LoaderSettings, RecDataModule
from recsys.optim import OptimizerConfig

_TARGETS = ("trainer", "data", "model", "optimus")
_NUMBERS = {int: "a whole number", float: "a number"}


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError naming the key of a resolved `config` that has a word for a number."""
    for group in _TARGETS:
        values = config.get(group) or {}
        _check_group(group, values, dict(_hints(values.get("_target_"))))
    for group in ("sparse_optimizer", "dense_optimizer"):
        _check_group(group, config[group], typing.get_type_hints(OptimizerConfig))


def _check_group(group: str, values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    for key, value in values.items():
        wanted = _number(hints.get(key)) if isinstance(value, str) else None
        if wanted is not None:
            raise ValueError(f"{group}.{key} is {value!r}, must be {wanted}")


def _hints(target: str | None) -> Iterator[tuple[str, Any]]:
    """Types of a class's arguments; a data module's further keywords are LoaderSettings'.

    None of what cannot be found, or tells no types: making it will say what is wrong.
    """
    try:
        cls: Any = get_object(target or "")
        if inspect.isclass(cls) and issubclass(cls, RecDataModule):
            yield from typing.get_type_hints(LoaderSettings).items()
        make = cls.__init__ if inspect.isclass(cls) else cls
        yield from typing.get_type_hints(inspect.unwrap(make)).items()
    except (ImportError, ValueError, NameError, TypeError):
        return


def _number(hint: Any) -> str | None:
    """What a value of type `hint` must be, where that is a number and can be no word."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    if any(option in (str, Path) or typing.get_origin(option) is Literal for option in options):
        return None
    return next((text for kind, text in _NUMBERS.items() if kind in options), None)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)
