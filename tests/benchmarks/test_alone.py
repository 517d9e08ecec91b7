"""What a process of its own says when it fails is told by the line that names the error."""

from __future__ import annotations

from benchmarks.alone import _read


def test_the_exception_is_named_and_not_the_advice_behind_it() -> None:
    errors = (
        "Traceback (most recent call last):\n  File ...\n"
        "torch.AcceleratorError: CUDA error: out of memory\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert _read("", errors, 1).failure == (
        "its own process ended with 1: torch.AcceleratorError: CUDA error: out of memory"
    )


def test_a_process_without_an_exception_is_told_by_its_last_line() -> None:
    assert _read("", "Killed\n", -9).failure.endswith("-9: Killed")
    assert _read("", "", -9).failure.endswith("-9: no output")
