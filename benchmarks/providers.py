"""The ways to run a training step that are compared: PyTorch's own, and ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Inputs
from optimus.backend import OptimusBackend
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing


@dataclass
class Job:
    """A model in training under one provider; `step` is forward, backward and optimizer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[..., Tensor]
    inputs: Inputs
    labels: Tensor
    amp: bool
    notes: list[str] = field(default_factory=list[str])

    def logits(self) -> Tensor:
        """The forward pass."""
        with autocast(self.labels.device, self.amp):
            return self.forward(*self.inputs)

    def learn(self, logits: Tensor) -> None:
        """Backward from the mean binary cross-entropy over batch and tasks, and the optimizer."""
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def forget(self) -> None:
        """Drop all gradients, those of the inputs as well, as those of tables would be."""
        self.optimizer.zero_grad(set_to_none=True)
        for tensor in self.inputs:
            tensor.grad = None

    def step(self) -> None:
        """One training step."""
        self.forget()
        self.learn(self.logits())


def autocast(device: torch.device, enabled: bool) -> AbstractContextManager[Any]:
    """bf16 autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


@dataclass(frozen=True)
class Provider:
    """`compile` turns a job's module into what its forward calls. `fused` takes the hand-fused
    twin; `whole_step` captures the step as one CUDA graph."""

    name: str
    compile: Callable[[Job], Callable[..., Tensor]]
    fused: bool = False
    whole_step: bool = False


def _eager(job: Job) -> Callable[..., Tensor]:
    return job.module


def _inductor(**options: Any) -> Callable[[Job], Callable[..., Tensor]]:
    def make(job: Job) -> Callable[..., Tensor]:
        return torch.compile(job.module, options=options or None)

    return make


def _mode(mode: str) -> Callable[[Job], Callable[..., Tensor]]:
    return lambda job: torch.compile(job.module, mode=mode)


_NORMALIZE: dict[str, Any] = {"normalization_pass": {}}
_SPLIT_CAT: dict[str, Any] = {
    "merge_splits_pass": {},
    "split_cat_pass": {},
    "unbind_stack_pass": {},
    "unbind_cat_to_view_pass": {},
}


def upstream(pre_grad: dict[str, Any], post_grad: dict[str, Any] | None = None) -> Any:
    """PyTorch's own passes, by their option names."""
    return _inductor(pre_grad_fusion_options=pre_grad, post_grad_fusion_options=post_grad or {})


_BATCH = {"batch_linear": {}, "batch_layernorm": {}}
_SMALL = {"min_fuse_set_size": 2, "max_fuse_set_size": 300, "fuse_nodes_with_same_parent": True}
_TUNED = {
    **_NORMALIZE,
    **_SPLIT_CAT,
    "batch_linear": _SMALL,
    "batch_linear_lhs": _SMALL,
    "batch_layernorm": _SMALL,
    "batch_relu": _SMALL,
    "batch_tanh": _SMALL,
    "batch_sigmoid": _SMALL,
}


def _optimus(patterns: str, packed: bool = False) -> Callable[[Job], Callable[..., Tensor]]:
    def make(job: Job) -> Callable[..., Tensor]:
        packing = None
        if packed:
            packing = Packing(adopt=PackedOptimizer([job.optimizer]).adopt)
        backend = OptimusBackend(patterns, packing=packing)
        job.notes = _Notes(backend, packing)
        return torch.compile(job.module, backend=backend)  # type: ignore[call-overload]

    return make


class _Notes(list[str]):
    """What the backend has to say, asked for after it has compiled."""

    def __init__(self, backend: OptimusBackend, packing: Packing | None) -> None:
        super().__init__()
        self._backend, self._packing = backend, packing

    def __iter__(self) -> Any:
        yield self._backend.report.table()
        if self._packing is not None:
            sizes = [len(p.parameters) for p in self._packing.packs]
            yield f"{len(sizes)} packs of {sum(sizes)} parameters"
            yield f"packing declined: {self._packing.declined}"


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("eager", _eager),
        Provider("compile", _inductor()),
        Provider("compile_max_autotune", _mode("max-autotune-no-cudagraphs")),
        Provider("reduce_overhead", _mode("reduce-overhead")),
        Provider("compile_step_graph", _inductor(), whole_step=True),
        Provider("combo_kernels", _inductor(combo_kernels=True)),
        Provider("upstream_vertical", upstream(_NORMALIZE | _SPLIT_CAT)),
        Provider("upstream_horizontal", upstream(_NORMALIZE | _BATCH)),
        Provider("upstream_all", upstream(_NORMALIZE | _SPLIT_CAT | _BATCH)),
        Provider("upstream_tuned", upstream(_TUNED)),
        Provider("optimus_vertical", _optimus("vertical")),
        Provider("optimus_horizontal", _optimus("horizontal")),
        Provider("optimus_all", _optimus("all")),
        Provider("optimus_packed", _optimus("all", packed=True)),
        Provider("optimus_step_graph", _optimus("all", packed=True), whole_step=True),
        Provider("fused_compile", _inductor(), fused=True),
        Provider("fused_step_graph", _inductor(), fused=True, whole_step=True),
    )
}
