"""What is made of measured windows: percentiles, phases, and gains that are like for like."""

from __future__ import annotations

import json

import pytest

from optimus.figures import MAX_WINDOWS, Gain, Phase, Window, gain, percentile


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


def test_a_phase_survives_json() -> None:
    made = phase("baseline", 100.0, 200.0, kernels_per_step=7, device="cpu")
    assert Phase.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert Phase.from_dict({**made.to_dict(), "from_a_later_version": 1}) == made


def test_gains_are_fractions_and_more_is_better() -> None:
    optimised = phase("optimised", 163.0)
    optimised.windows[0].peak_memory["allocated"] = 94
    found = gain(phase("baseline", 100.0), optimised)
    assert found.qps == pytest.approx(0.63)
    assert found.qps_range == pytest.approx((0.63, 0.63))
    assert found.peak_memory == pytest.approx(0.06)
    assert (found.qps_note, found.memory_note) == ("", "")


@pytest.mark.parametrize(
    ("baseline", "optimised", "reason"),
    [
        (None, phase("optimised", 1.0), "no baseline"),
        (phase("baseline", steps=4), phase("optimised", 1.0), "too few steps: the baseline phase"),
        (phase("baseline", 1.0), phase("optimised"), "too few steps: the optimised phase"),
        (phase("baseline", 1.0, device="H200"), phase("optimised", 1.0, device="cpu"), "H200"),
        (phase("baseline", 1.0, world_size=2), phase("optimised", 1.0), "world size 2"),
        (phase("baseline", 1.0, unit="steps/s"), phase("optimised", 1.0), "steps/s"),
    ],
)
def test_a_gain_that_is_not_like_for_like_is_none_with_a_reason(
    baseline: Phase | None, optimised: Phase, reason: str
) -> None:
    found = gain(baseline, optimised)
    assert found == Gain(None, None, None, found.qps_note, found.qps_note)
    assert reason in found.qps_note


def test_memory_taken_in_two_ways_is_not_compared() -> None:
    sampled = phase("optimised", 100.0, memory_note="sampled after each step")
    found = gain(phase("baseline", 100.0), sampled)
    assert found.qps == pytest.approx(0.0)
    assert found.peak_memory is None
    assert "sampled after each step" in found.memory_note


def test_the_range_of_a_gain_shows_noise() -> None:
    noisy = gain(phase("baseline", 100.0, 50.0, 150.0), phase("optimised", 110.0, 60.0, 160.0))
    assert noisy.qps == pytest.approx(0.1)
    assert noisy.qps_range is not None
    assert noisy.qps_range[0] < 0 < noisy.qps_range[1]
