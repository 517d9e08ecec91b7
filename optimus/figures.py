"""What was measured, as plain data: windows, and the phases of a run that consist of them.

Nothing in here takes a measurement (`measure.py` does); these records are what is logged, written
to the summary file and kept in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, Literal

Unit = Literal["samples/s", "steps/s"]

MAX_WINDOWS = 256
"""Windows kept for one phase; past it every second one is dropped, so a long run stays small."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile `percent` (0 to 100) of at least one value, linearly interpolated."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Window:
    """Some consecutive warm training steps, none of which compiled anything.

    `samples` counts those of all ranks (steps, where the batch size is not known); `step_rates` are
    the 10th, 50th and 90th percentile of the single steps' rates, in samples a second.
    `peak_memory` is in bytes: "allocated" and "reserved" on a GPU, "resident" on a CPU. `process`
    counts the resumes of the run before the window was measured.
    """

    first_step: int
    steps: int
    samples: int
    seconds: float
    step_rates: tuple[float, float, float]
    peak_memory: dict[str, int] = field(default_factory=dict[str, int])
    process: int = 0

    @property
    def rate(self) -> float:
        """Samples a second over the whole window."""
        return self.samples / self.seconds

    @staticmethod
    def of(
        first_step: int,
        samples: Sequence[int],
        seconds: Sequence[float],
        peak_memory: Mapping[str, int],
    ) -> Window:
        """Sum up steps whose sample counts and durations in seconds are given one by one."""
        rates = [n / max(s, 1e-9) for n, s in zip(samples, seconds, strict=True)]
        p10, p50, p90 = (percentile(rates, p) for p in (10, 50, 90))
        total = max(sum(seconds), 1e-9)
        return Window(
            first_step, len(rates), sum(samples), total, (p10, p50, p90), dict(peak_memory)
        )


@dataclass
class Phase:
    """One phase of a run, the baseline or the optimised one, and all that was measured in it.

    `runs` says in words what executed. `source` is "measured" in this process or "checkpoint" when
    the figures were stored by an earlier one. `kernels_note` and `memory_note` say how the figure
    was taken, or why there is none.
    """

    name: str
    runs: str = ""
    unit: Unit = "samples/s"
    device: str = ""
    world_size: int = 1
    source: str = "measured"
    first_step: int | None = None
    steps: int = 0
    windows: list[Window] = field(default_factory=list[Window])
    windows_measured: int = 0
    windows_discarded: int = 0
    kernels_per_step: int | None = None
    kernels_note: str = ""
    memory_note: str = ""
    compile_seconds: float = 0.0
    graphs: int = 0
    recompiles: int = 0

    def add(self, window: Window) -> None:
        """Keep `window`; when there are too many, thin the older ones out, all but the first three.

        Those are next to the take-over, where the two phases are compared most safely.
        """
        self.windows.append(window)
        self.windows_measured += 1
        if len(self.windows) > MAX_WINDOWS:
            self.windows = self.windows[:2] + self.windows[2::2]

    def rate(self) -> float | None:
        """Samples a second: the median over the windows."""
        return median(w.rate for w in self.windows) if self.windows else None

    def rates(self) -> tuple[float, float, float] | None:
        """10th, 50th and 90th percentile of the windows' samples a second."""
        values = [w.rate for w in self.windows]
        if not values:
            return None
        return percentile(values, 10), percentile(values, 50), percentile(values, 90)

    def step_ms(self) -> float | None:
        """Milliseconds a step: the median over the windows."""
        return median(w.seconds / w.steps for w in self.windows) * 1e3 if self.windows else None

    def peak_memory(self) -> dict[str, int]:
        """Bytes by kind: the median of the windows' peaks.

        Not the maximum, because the phases differ in length and a maximum only grows with it.
        """
        kinds = sorted({kind for w in self.windows for kind in w.peak_memory})
        return {
            kind: int(median(w.peak_memory[kind] for w in self.windows if kind in w.peak_memory))
            for kind in kinds
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for checkpoints."""
        plain = asdict(self)
        plain["windows"] = [{**asdict(w), "step_rates": list(w.step_rates)} for w in self.windows]
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Phase:
        """The phase that `to_dict` wrote. Keys of a later version are ignored."""
        known = {f.name for f in fields(Phase)} - {"windows"}
        phase = Phase(**{k: v for k, v in plain.items() if k in known})
        phase.windows = [_window(window) for window in plain.get("windows", ())]
        return phase


def _window(plain: Mapping[str, Any]) -> Window:
    p10, p50, p90 = plain["step_rates"]
    others = {key: value for key, value in plain.items() if key != "step_rates"}
    return Window(step_rates=(p10, p50, p90), **others)
