"""Traces operators whose kernels copy by TMA, without a GPU: python -m tests.kernels.traced

As torch.compile does on a Hopper GPU, but on fake tensors and with the tile shape pinned. Exits
with 1 when a launch in the graph lacks a descriptor, or is taken to write to anything but its
results: a result that it is not taken to write to would come out as it was allocated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _triton as torch_on_triton
from torch.utils._pytree import tree_leaves
from triton.runtime import driver

from kernels import cross_layer, descriptors, gated_linear, launch, linear_act, operators, tuning
from kernels.cross_layer import triton as _cross_layer
from kernels.gated_linear import triton as _gated_linear
from kernels.linear_act import triton as _linear_act
from tests.kernels.hopper import _Hopper

TILE = tuning.tile(TMA=1, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)
OPS = torch.ops.kernels
X, W, Y, BIAS = (64, 96), (96, 48), (64, 48), (96,)

# The operator, shapes of its tensors, what else it takes; descriptors; results.
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[Any], str, str]] = {
    "gated_linear": (
        OPS.gated_linear,
        [Y, W, W],
        [None, None, "gelu", False],
        "x gate up",
        "out_ptr",
    ),
    "gated_linear for training": (
        OPS.gated_linear,
        [Y, W, W, BIAS, BIAS],
        ["gelu", True],
        "x gate up",
        "out_ptr opened_ptr value_ptr",
    ),
    "cross_layer": (OPS.cross_layer, [X, Y, W, BIAS, X], [], "x0 y weight x out", "out"),
    "cross_layer_backward": (
        OPS.cross_layer_backward,
        [X, X, Y, W, BIAS],
        [],
        "grad x0 y weight grad_x0 projected",
        "grad_x0 projected partial_ptr",
    ),
    "linear_act": (
        OPS.linear_act,
        [Y, W, BIAS],
        ["gelu", True],
        "x weight out z_out",
        "out z_out",
    ),
}


def _pretend() -> None:
    """A Hopper GPU is there for whoever asks, but for running kernels."""
    driver.set_active(_Hopper())
    torch_on_triton.has_triton_tensor_descriptor_host_tma = lambda: True
    descriptors.has_tma = lambda device: True
    operators.Operator._is_tuned = lambda self, args, kwargs: True  # type: ignore[method-assign]
    for module in (launch, cross_layer, gated_linear, linear_act):
        module.can_launch = module.can_multiply = lambda *tensors: True  # type: ignore[attr-defined]
    for kernels in (_cross_layer, _gated_linear, _linear_act):
        kernels.on_device = lambda tensor: contextlib.nullcontext()
        kernels.choose = lambda *choice: TILE


def _check(name: str) -> list[str]:
    op, shapes, others, described, written = CASES[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
        graph = aot_export_joint_simple(
            lambda *tensors: tuple(tree_leaves(op(*tensors, *others))), inputs, trace_joint=False
        )
    launches = [n.kwargs for n in graph.graph.nodes if "triton_kernel" in str(n.target)]
    if len(launches) != 1:
        return [f"{name}: {len(launches)} launches in the graph"]
    found = {
        "descriptors": (set(launches[0]["tma_descriptor_metadata"]), set(described.split())),
        "written": (set(launches[0]["tensors_to_clone"]), set(written.split())),
    }
    return [f"{name}, {what}: {one} for {two}" for what, (one, two) in found.items() if one != two]


def main() -> int:
    """Trace each case."""
    _pretend()
    failures = [line for name in CASES for line in _check(name)]
    print("\n".join(failures))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
