"""Names that users write: checked before any work, with the nearest valid ones in the error."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(what: str, name: str, valid: Collection[str]) -> str:
    """`name` itself if it is valid; raises ValueError naming the nearest ones if it is not."""
    if name in valid:
        return name
    near = difflib.get_close_matches(name, list(valid), n=3, cutoff=0.4) or sorted(valid)[:8]
    raise ValueError(f"unknown {what} {name!r}; nearest valid: {', '.join(near)}")
