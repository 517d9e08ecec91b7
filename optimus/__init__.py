"""Graph rewrites for recommender models, run before torch.compile.

`OptimusCallback` for a Lightning Trainer, `compile` for a loop of one's own, or
`torch.compile(fn, backend="optimus")`. The names below are imported when they are first used, so
that the backend does not need Lightning.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "OptimusBackend": "optimus.backend",
    "OptimusCallback": "optimus.callback",
    "Packing": "optimus.packing",
    "compile": "optimus.backend",
    "pattern_names": "optimus.pipeline",
    "register": "optimus.pipeline",
    "report": "optimus.lookup",
    "select": "optimus.pipeline",
    "unregister": "optimus.pipeline",
    "write_explanations": "optimus.explain",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'optimus' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
