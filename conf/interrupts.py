"""How a multirun ends that is told to by a signal: its job first, then what is left to say."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def at_interrupt(then: Callable[[], None]) -> None:
    """From now on SIGTERM and SIGINT raise SystemExit with the status that shells give for them;
    `then` is called when that has ended the program. More of them change nothing, and neither does
    one that was ignored before, as SIGINT is for what a shell script runs in the background."""

    def end(number: int, frame: Any) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        atexit.register(then)
        raise SystemExit(128 + number)

    for each in _SIGNALS:
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, end)
