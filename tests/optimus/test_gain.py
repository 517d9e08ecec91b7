"""Gains that are like for like, and the reasons to doubt them, on rates as they were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimus.figures import MAX_WINDOWS, Phase
from optimus.gain import Gain, gain
from tests.optimus.test_figures import phase, window

LOADED = (2173.0, 1199.0, 1419.0, 1432.0, 1411.0, 1136.0)
"""Windows of a baseline with a neighbour on the machine, which stayed for the first of these:"""

LEFT_ALONE = (1126.0, 1108.0, 1553.0, 19300.0, *[18400.0, 18600.0, 18000.0] * 7)


def of_processes(name: str, *rates: tuple[int, float]) -> Phase:
    """A phase of windows that are given as the process and the rate."""
    made = Phase(name)
    for process, rate in rates:
        made.add(replace(window(rate), process=process))
    return made


def test_gains_are_fractions_and_more_is_better() -> None:
    optimised = phase("optimised", 163.0)
    optimised.windows[0].peak_memory["allocated"] = 94
    found = gain(phase("baseline", 100.0), optimised)
    assert found.qps == pytest.approx(0.63)
    assert found.qps_range == pytest.approx((0.63, 0.63))
    assert found.peak_memory == pytest.approx(0.06)
    assert (found.qps_note, found.memory_note) == ("", "")
    assert found.doubts == ("few windows: 1 and 1; more baseline_steps would tell more",)


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


def test_a_gain_inside_the_noise_is_called_that() -> None:
    noisy = gain(phase("baseline", 100.0, 80.0, 120.0), phase("optimised", 110.0, 90.0, 130.0))
    assert noisy.doubts == ("within the noise: -19% to +50% from window to window",)


def test_steady_phases_of_one_process_leave_no_doubt() -> None:
    found = gain(phase("baseline", 99.0, 100.0, 101.0), phase("optimised", 140.0, 160.0, 150.0))
    assert found.doubts == ()


def test_a_neighbour_that_leaves_during_a_phase_makes_the_gain_doubtful() -> None:
    found = gain(phase("baseline", *LOADED), phase("optimised", *LEFT_ALONE))
    assert found.qps is not None and found.qps > 11
    assert found.doubts == (
        "not to be trusted: windows of the optimised phase differ 17-fold, as when something else "
        "uses the machine; around the take-over: -20.2%",
    )


def test_a_neighbour_that_came_during_the_baseline_is_seen_there() -> None:
    found = gain(phase("baseline", 10.0, 30.0, 30.0), phase("optimised", 31.0, 30.0, 30.0))
    assert found.doubts == (
        "windows of the baseline phase differ 3.0-fold, as when something else uses the machine; "
        "around the take-over: +0.0%",
    ), "what is seen around the take-over bears the gain out"


def test_a_change_of_speed_is_seen_in_the_longest_phase() -> None:
    optimised = phase("optimised", *LEFT_ALONE[:3], *[18400.0] * 20 * MAX_WINDOWS)
    (doubt,) = gain(phase("baseline", *LOADED), optimised).doubts
    assert doubt.startswith("not to be trusted")
    assert doubt.endswith("around the take-over: -20.2%")


def test_one_odd_window_among_many_is_no_change_of_speed() -> None:
    """The baseline of benchmarks/results/train/dlrm_synthetic.json, on a GPU of its own."""
    baseline = phase("baseline", 296020, 163768, 218575, 65260, 217201, 232261)
    assert gain(baseline, phase("optimised", *[600_000.0] * 6)).doubts == ()


@pytest.mark.parametrize(
    ("counts", "doubt"),
    [
        ((1, 3), "few windows: 1 and 3; more baseline_steps would tell more"),
        ((3, 2), "few windows: 3 and 2; a longer run would tell more"),
    ],
)
def test_few_windows_are_called_that(counts: tuple[int, int], doubt: str) -> None:
    baseline, optimised = (
        phase(name, *[rate] * count)
        for name, rate, count in zip(("baseline", "optimised"), (100.0, 200.0), counts, strict=True)
    )
    assert gain(baseline, optimised).doubts == (doubt,)


RESUMED = (
    "windows from before and after a resume are compared, and machine and load may have been others"
)


def test_a_baseline_of_an_earlier_process_alone_is_doubtful() -> None:
    baseline = of_processes("baseline", *[(0, 100.0)] * 4)
    found = gain(baseline, of_processes("optimised", *[(1, 1048.0)] * 4))
    assert found.qps == pytest.approx(9.48)
    assert found.doubts == (RESUMED,)


def test_one_process_that_measured_both_phases_bears_the_gain_out() -> None:
    both = [(0, 100.0)] * 4 + [(1, 102.0)] * 3
    assert (
        gain(of_processes("baseline", *both), of_processes("optimised", *[(1, 160.0)] * 4)).doubts
        == ()
    )
    resumed_later = [(0, 160.0)] * 3 + [(1, 165.0)] * 9
    assert (
        gain(
            of_processes("baseline", *[(0, 100.0)] * 4), of_processes("optimised", *resumed_later)
        ).doubts
        == ()
    )


def test_one_process_that_measured_another_gain_is_told() -> None:
    baseline = of_processes("baseline", *[(0, 100.0)] * 4)
    optimised = of_processes("optimised", *[(0, 105.0)] * 3, *[(1, 180.0)] * 9)
    assert gain(baseline, optimised).doubts == (f"{RESUMED}; within one process: +5.0%",)


def test_two_windows_of_one_process_bear_nothing_out() -> None:
    baseline = of_processes("baseline", *[(0, 100.0)] * 4, *[(1, 100.0)] * 2)
    assert gain(baseline, of_processes("optimised", *[(1, 160.0)] * 4)).doubts == (RESUMED,)


def test_a_resume_between_the_phases_is_no_take_over_to_compare_at() -> None:
    baseline = of_processes("baseline", *[(0, 10.0)] * 3, *[(0, 100.0)] * 3)
    unsteady, resumed = gain(baseline, of_processes("optimised", *[(1, 160.0)] * 4)).doubts
    assert unsteady.endswith("something else uses the machine")
    assert resumed == RESUMED
