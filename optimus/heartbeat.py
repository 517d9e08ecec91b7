"""Lines that say that something which takes minutes is still going on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECONDS = 20.0
"""Between two lines; what takes less says nothing."""


class Heartbeat:
    """Calls `say` with the time gone by, every SECONDS between `begin` and `end`."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def begin(self, what: str, say: Callable[[str], None]) -> None:
        """From now on, say that it is still `what`."""
        self.end()
        self._over = threading.Event()
        # A daemon: a run that ends meanwhile does not wait for it.
        threading.Thread(target=_beat, args=(self._over, what, say), daemon=True).start()

    def end(self) -> None:
        """Say nothing more."""
        self._over.set()


def _beat(over: threading.Event, what: str, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    while not over.wait(SECONDS):
        say(f"still {what}, for {time.monotonic() - began:.0f} s so far ...")
