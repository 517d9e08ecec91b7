"""Signals that end a multirun."""

from __future__ import annotations

import signal

from conf.interrupts import at_interrupt


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = [signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        at_interrupt(lambda: None)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
