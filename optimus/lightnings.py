"""Callbacks that the Trainer of either Lightning package accepts."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def accepted_by_both(cls: Any, other: Any) -> Any:
    """`cls`, also derived from `pytorch_lightning`'s Callback where that package is in use.

    Each package's Trainer refuses callbacks of the other one.
    """
    if other is None or issubclass(cls, other.Callback):
        return cls
    return type(cls.__name__, (cls, other.Callback), {"__module__": cls.__module__, "plain": cls})


def plain_class(cls: Any) -> Any:
    """The class that `accepted_by_both` was given to make `cls` of."""
    return cls.__dict__.get("plain", cls)
