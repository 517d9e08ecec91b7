"""The illustrative graph launches about as many kernels as it is said to.

Counted on the CPU: operators that reach the dispatcher below autograd, without views and
allocations, in float32, where each is one kernel on a GPU. Three are more, by PyTorch's CUDA
sources: a cat of n tensors takes a kernel for each 128 of them, a fused AdamW step one for each 36
parameters, and adding 1 to all their step counts one for each 110.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.illustrative import IllustrativeGraph
from benchmarks.models import MODELS
from benchmarks.providers import loss_of

aten = torch.ops.aten
TENSORS_A_KERNEL = {
    aten.cat.default: 128,
    aten._fused_adamw_.default: 36,
    aten._foreach_add_.Scalar: 110,
}
NO_KERNEL = {
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.zeros_like.default,  # the optimizer's state, on its first step only
    aten.expand.default,
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.t.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.transpose.int,
}


class Launches(TorchDispatchMode):
    """Kernels that the operators would launch on a GPU."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in TENSORS_A_KERNEL:
            self.count += math.ceil(len(args[0]) / TENSORS_A_KERNEL[func])
        elif func not in NO_KERNEL:
            self.count += 1
        return func(*args, **(kwargs or {}))


def graph() -> tuple[IllustrativeGraph, torch.Tensor]:
    torch.manual_seed(0)
    model = MODELS["illustrative"]
    module = model.build("full")
    assert isinstance(module, IllustrativeGraph)
    (x,) = model.inputs(2, torch.device("cpu"), "full")
    return module, x


def test_inference_launches_about_6320_kernels() -> None:
    module, x = graph()
    with torch.no_grad(), Launches() as launches:
        module(x)
    # 6 a branch, 9 to join 1,052 tensors, 1 for the mean.
    assert launches.count == 6 * 1052 + 9 + 1
    assert abs(launches.count / 6320 - 1) < 0.001


def test_a_training_step_launches_about_12772_kernels() -> None:
    module, x = graph()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    labels = torch.ones(2, 1)
    loss_of(module(x), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    with Launches() as launches:
        loss_of(module(x), labels).backward()
        optimizer.step()
    assert abs(launches.count / 12_772 - 1) < 0.01, launches.count


def test_it_says_something_and_learns() -> None:
    module, x = graph()
    logits = module(x)
    assert logits.shape == (2, 1) and logits.std() > 0
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())
