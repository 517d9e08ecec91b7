"""What kernels copy by TMA, what they read by pointers, and how the former are traced."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import descriptors, launch
from kernels.cross_layer import low_rank_cross_layer
from kernels.descriptors import Blocks
from kernels.gated_linear import gated_linear
from kernels.linear_act import linear_act
from kernels.matmul import TILES, TMA_TILES, menu
from tests import processes
from tests.kernels import checks

OPERATORS = {
    "cross_layer": (low_rank_cross_layer, [(19, 24), (19, 24), (40, 24), (24, 40)]),
    "gated_linear": (gated_linear, [(19, 40), (24, 40), (24, 40)]),
    "linear_act": (linear_act, [(19, 40), (24, 40)]),
}


def _bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


FITTING = {
    "whole": _bf16(3, 8),
    "with bytes left over in each row": _bf16(3, 16)[:, :5],
    "that begins later": _bf16(4, 16)[1:, 8:],
    "of float32": torch.zeros(3, 4),
}
OTHERS = {
    "with odd rows": _bf16(3, 9),
    "that begins between two multiples of 16 bytes": _bf16(3, 16)[:, 4:12],
    "with gaps in its rows": checks.apart(_bf16(3, 8)),
    "transposed": _bf16(8, 8).T,
    "with one row many times": _bf16(1, 8).expand(3, 8),
    "without rows": _bf16(0, 8),
    "without columns": _bf16(3, 0),
    "of float64": torch.zeros(3, 8, dtype=torch.float64),
}


@pytest.mark.parametrize("matrix", FITTING.values(), ids=FITTING)
def test_tma_copies_a_matrix(matrix: Tensor) -> None:
    assert launch.can_describe(matrix)
    with launch.tracing():
        assert launch.can_describe(matrix), "told by its offset alone"


@pytest.mark.parametrize("matrix", OTHERS.values(), ids=OTHERS)
def test_tma_does_not_copy_a_matrix(matrix: Tensor) -> None:
    assert not launch.can_describe(matrix)
    assert not launch.can_describe(_bf16(3, 8), matrix)
    with launch.tracing():
        assert not launch.can_describe(matrix)


def test_tiles_with_tma_are_for_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert menu(TILES, TMA_TILES, _bf16(3, 8), _bf16(3, 8)) == (*TMA_TILES, *TILES)
    assert menu(TILES, TMA_TILES, _bf16(3, 8), _bf16(3, 9)) == TILES
    single = torch.zeros(3, 8)
    assert menu(TILES, TMA_TILES, single, single) == TILES
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert menu(TILES, TMA_TILES, single, single) == (*TMA_TILES, *TILES)


def test_only_gpus_that_have_it_copy_by_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    assert not launch.can_describe(_bf16(3, 8))
    monkeypatch.setattr(descriptors, "has_tma", lambda device: True)
    assert launch.can_describe(_bf16(3, 8))


def test_without_the_names_that_tracing_needs_there_is_no_tma(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert descriptors.can_trace()
    descriptors.can_trace.cache_clear()
    monkeypatch.setitem(sys.modules, "torch._higher_order_ops.triton_kernel_wrap", None)
    try:
        assert not descriptors.has_tma(torch.device("cuda:0"))
    finally:
        descriptors.can_trace.cache_clear()


def _displaced(tensor: Tensor) -> Tensor:
    room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("place", [_displaced, checks.apart])
@pytest.mark.parametrize("name", OPERATORS)
def test_what_tma_cannot_copy_is_read_by_pointers(
    name: str, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tiles, as in a process that has measured nothing."""
    launched: list[bool] = []

    def spy(args: Sequence[Any]) -> Sequence[Any]:
        launched.append(any(isinstance(arg, Blocks) for arg in args))
        return described(args)

    described = descriptors.described
    monkeypatch.setattr(descriptors, "described", spy)
    op, shapes = OPERATORS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    with checks.poisoned():
        whole = op(*inputs)
        assert launched == [True]
        for moved in range(len(inputs)):
            x = [place(t) if i == moved else t for i, t in enumerate(inputs)]
            torch.testing.assert_close(op(*x), whole)
    # The product with `down` is a tensor of its own, wherever its two factors lie.
    other = 2 if name == "cross_layer" else None
    assert launched[1:] == [moved == other for moved in range(len(inputs))]


def test_a_traced_launch_says_what_it_writes() -> None:
    """In a process of its own: here kernels are loaded for the interpreter."""
    command = [sys.executable, "-m", "tests.kernels.traced"]
    done = processes.run(command, timeout=300, forked=True)
    assert done.returncode == 0, done.stdout + done.stderr
