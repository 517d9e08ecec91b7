"""What is made of measured windows: percentiles and phases."""

from __future__ import annotations

import json

import pytest

from optimus.figures import MAX_WINDOWS, Phase, Window, percentile


def window(rate: float, memory: int = 100, step: int = 0) -> Window:
    """Ten steps at `rate` samples a second with a peak of `memory` bytes."""
    return Window.of(step, [10] * 10, [10 / rate] * 10, {"allocated": memory})


def phase(name: str, *rates: float, **fields: object) -> Phase:
    made = Phase(name, memory_note="as the allocator says")
    for rate in rates:
        made.add(window(rate))
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def test_percentile_interpolates_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 10) == pytest.approx(1.0)
    assert percentile([7.0], 90) == 7.0


def test_a_window_sums_up_its_steps() -> None:
    made = Window.of(5, [10, 10, 10, 30], [1.0, 2.0, 1.0, 1.0], {"resident": 3})
    assert made.rate == pytest.approx(60 / 5)
    assert made.steps == 4
    assert made.step_rates[1] == pytest.approx(10.0)
    assert made.step_rates[0] < made.step_rates[1] < made.step_rates[2]


def test_a_phase_reports_the_median_of_its_windows() -> None:
    made = phase("baseline", 100.0, 300.0, 110.0)
    assert made.rate() == pytest.approx(110.0)
    assert made.step_ms() == pytest.approx(10 / 110 * 1e3)
    rates = made.rates()
    assert rates is not None
    assert rates[0] < rates[1] < rates[2]


def test_a_long_phase_keeps_a_bounded_number_of_windows() -> None:
    made = Phase("optimised")
    for step in range(3 * MAX_WINDOWS):
        made.add(window(100.0, step=step))
    assert made.windows_measured == 3 * MAX_WINDOWS
    assert len(made.windows) <= MAX_WINDOWS
    assert made.windows[-1].first_step == 3 * MAX_WINDOWS - 1
    assert [w.first_step for w in made.windows[:2]] == [0, 1]


def test_a_phase_survives_json() -> None:
    made = phase("baseline", 100.0, 200.0, kernels_per_step=7, device="cpu")
    assert Phase.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert Phase.from_dict({**made.to_dict(), "from_a_later_version": 1}) == made


def test_a_phase_of_before_windows_had_a_process_can_be_read() -> None:
    made = phase("baseline", 100.0)
    plain = made.to_dict()
    del plain["windows"][0]["process"]
    assert Phase.from_dict(plain) == made
