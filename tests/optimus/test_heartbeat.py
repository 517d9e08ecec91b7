"""What takes long says so, and only while it does."""

from __future__ import annotations

import time

import pytest

from optimus import heartbeat
from optimus.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.05)


def test_it_says_so_until_the_end() -> None:
    said: list[str] = []
    beats = Heartbeat()
    beats.begin("compiling", said.append)
    deadline = time.monotonic() + 20
    while len(said) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    beats.end()
    time.sleep(0.02)  # a line may be on its way
    count = len(said)
    time.sleep(0.2)
    assert len(said) == count >= 2
    assert said[0] == "still compiling, for 0 s so far ..."


def test_what_is_quick_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 60)
    said: list[str] = []
    beats = Heartbeat()
    beats.begin("compiling", said.append)
    beats.end()
    beats.end()
    assert not said


def test_a_second_beginning_ends_the_first() -> None:
    said: list[str] = []
    beats = Heartbeat()
    beats.begin("rewriting", said.append)
    beats.begin("compiling", said.append)
    time.sleep(0.3)
    beats.end()
    assert any("compiling" in line for line in said)
    assert sum("rewriting" in line for line in said) <= 1
