"""The ways to run a training step that are compared: PyTorch's own, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.models import BenchmarkModel, Inputs
from optimus.backend import OptimusBackend
from optimus.capture import CudaCapture
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing
from optimus.partitioning import Recompute
from optimus.step_graphs import StepGraphs

Inner = Literal["inductor", "aot_eager"]
Objective = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class Job:
    """A model in training under one provider; `step` is forward, backward and optimizer.

    `forward` takes inputs and labels and returns loss and logits: what the provider made of
    `objective`. `inner` is what stands in for Inductor: aot_eager compiles in no time and generates
    no code. `notes` are read when all has been compiled; `begin` is called before each step.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Objective
    inputs: Inputs
    labels: Tensor
    amp: bool
    inner: Inner = "inductor"
    notes: Callable[[], Iterator[str]] = field(default=lambda: iter(()))
    begin: Callable[[], None] = lambda: None

    @property
    def objective(self) -> Objective:
        """What a provider compiles: the model with its loss, as `RecModule.loss_and_logits`."""
        return objective_of(self.module)

    def loss_and_logits(self) -> tuple[Tensor, Tensor]:
        """The forward pass."""
        with autocast(self.labels.device, self.amp):
            return self.forward(*self.inputs, self.labels)

    def learn(self, loss: Tensor) -> None:
        """Backward from the loss, and the optimizer."""
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def forget(self) -> None:
        """Drop all gradients, those of the inputs as well, as those of tables would be."""
        self.optimizer.zero_grad(set_to_none=True)
        for tensor in self.inputs:
            tensor.grad = None

    def step(self) -> None:
        """One training step."""
        self.begin()
        self.forget()
        self.learn(self.loss_and_logits()[0])


def objective_of(module: nn.Module) -> Objective:
    """Loss and detached logits of a module's inputs and, last, labels."""

    def objective(*given: Tensor) -> tuple[Tensor, Tensor]:
        *inputs, labels = given
        logits = _wide(module(*inputs))
        return loss_of(logits, labels), logits.detach()

    return objective


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross-entropy over batch and tasks, at float32 or better."""
    wide = _wide(logits)
    return nn.functional.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def autocast(device: torch.device, enabled: bool) -> AbstractContextManager[Any]:
    """bf16 autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


@dataclass(frozen=True)
class Provider:
    """`compile` turns a job's objective into its `forward`. `fused` takes the hand-fused
    twin; `whole_step` captures the step as one CUDA graph. `needs_inductor`: another compiler
    would ignore its options; `needs_gpu`: it differs from another provider there only."""

    name: str
    compile: Callable[[Job], Objective]
    fused: bool = False
    whole_step: bool = False
    needs_inductor: bool = False
    needs_gpu: bool = False

    def objection(self, model: BenchmarkModel, device: torch.device, inner: Inner) -> str:
        """Why it is not run; empty if it is."""
        if self.fused and model.fused is None:
            return "the model has no repeated branches to fuse"
        if device.type != "cuda" and (self.whole_step or self.needs_gpu):
            return "needs a GPU"
        if inner != "inductor" and self.needs_inductor:
            return f"its options are Inductor's, not {inner}'s"
        return ""


def _eager(job: Job) -> Objective:
    return job.objective


def _compile(job: Job) -> Objective:
    return torch.compile(job.objective, backend=job.inner)


def _inductor(**options: Any) -> Callable[[Job], Objective]:
    return lambda job: torch.compile(job.objective, options=options)


def _mode(mode: str) -> Callable[[Job], Objective]:
    return lambda job: torch.compile(job.objective, mode=mode)


# The presets of PyTorch's own benchmark.
_NORMALIZE: dict[str, Any] = {"normalization_pass": {}}
_VERTICAL: dict[str, Any] = {
    **_NORMALIZE,
    "merge_splits_pass": {},
    "split_cat_pass": {},
    "unbind_stack_pass": {},
    "unbind_cat_to_view_pass": {},
}
_HORIZONTAL: dict[str, Any] = {**_NORMALIZE, "batch_linear": {}, "batch_layernorm": {}}
# The best set found by hand: small groups too, and all that is batched before autograd.
_SMALL = {"min_fuse_set_size": 2, "max_fuse_set_size": 300, "fuse_nodes_with_same_parent": True}
_BATCHED = ("linear", "linear_lhs", "layernorm", "relu", "tanh", "sigmoid")
TUNED: dict[str, Any] = {**_VERTICAL, **{f"batch_{name}": _SMALL for name in _BATCHED}}
# And after autograd, where the passes take static shapes only.
_LATE = ("linear_post_grad", "aten_tanh", "aten_sigmoid", "aten_relu", "aten_add", "aten_mul")
_TUNED_LATE: dict[str, Any] = {f"batch_{name}": _SMALL for name in _LATE}


def _upstream(name: str, before: dict[str, Any], after: dict[str, Any] | None = None) -> Provider:
    """PyTorch's own passes, before and after autograd, by their option names."""
    options = _inductor(pre_grad_fusion_options=before, post_grad_fusion_options=after or {})
    return Provider(name, options, needs_inductor=True)


def _optimus(
    patterns: str, packed: bool = False, recompute: Recompute = "auto", **options: Any
) -> Callable[[Job], Objective]:
    def make(job: Job) -> Objective:
        packing = Packing(adopt=PackedOptimizer([job.optimizer]).adopt) if packed else None
        backend = OptimusBackend(
            patterns,
            inner=job.inner,
            inner_options=options or None,
            recompute=recompute,
            packing=packing,
        )
        job.notes = lambda: _notes(backend, packing)
        return torch.compile(job.objective, backend=backend)  # type: ignore[call-overload]

    return make


def _replayed(**options: Any) -> Callable[[Job], Objective]:
    """As OptimusCallback's cuda_graphs=step does it; `options` are Inductor's."""

    def make(job: Job) -> Objective:
        graphs = StepGraphs(CudaCapture(job.labels.device))
        packing = Packing(adopt=PackedOptimizer([job.optimizer]).adopt)
        backend = OptimusBackend(
            "all",
            inner=job.inner,
            inner_options=options or None,
            packing=packing,
            graphs=graphs,
        )
        graphs.install([job.optimizer])
        job.begin = graphs.begin_step
        job.notes = lambda: iter(
            [*_notes(backend, packing), *graphs.remarks(), str(graphs.to_dict())]
        )
        return torch.compile(job.objective, backend=backend)  # type: ignore[call-overload]

    return make


def _notes(backend: OptimusBackend, packing: Packing | None) -> Iterator[str]:
    yield backend.report.table()
    if packing is not None:
        sizes = [len(pack.parameters) for pack in packing.packs]
        yield f"{len(sizes)} packs of {sum(sizes)} parameters; declined: {packing.declined}"


_ALL = (
    Provider("eager", _eager),
    Provider("compile", _compile),
    Provider("compile_max_autotune", _mode("max-autotune-no-cudagraphs"), needs_inductor=True),
    Provider("reduce_overhead", _mode("reduce-overhead"), needs_gpu=True, needs_inductor=True),
    Provider("compile_step_graph", _compile, whole_step=True),
    Provider("combo_kernels", _inductor(combo_kernels=True), needs_inductor=True),
    _upstream("upstream_vertical", _VERTICAL),
    _upstream("upstream_horizontal", _HORIZONTAL),
    _upstream("upstream_all", _VERTICAL | _HORIZONTAL),
    _upstream("upstream_tuned", TUNED),
    _upstream("upstream_tuned_late", TUNED, _TUNED_LATE),
    Provider("optimus_vertical", _optimus("vertical")),
    Provider("optimus_horizontal", _optimus("horizontal")),
    Provider("optimus_horizontal_packed", _optimus("horizontal", packed=True)),
    Provider("optimus_all", _optimus("all")),
    Provider("optimus_packed", _optimus("all", packed=True)),
    Provider(
        "optimus_packed_recompute",
        _optimus("all", packed=True, recompute=True),
        needs_inductor=True,
    ),
    Provider(
        "optimus_packed_keep",
        _optimus("all", packed=True, recompute=False),
        needs_inductor=True,
    ),
    Provider(
        "optimus_reduce_overhead",
        _optimus("all", packed=True, **{"triton.cudagraphs": True}),
        needs_gpu=True,
        needs_inductor=True,
    ),
    Provider("optimus_all_step_graph", _optimus("all"), whole_step=True),
    Provider("optimus_step_graph", _optimus("all", packed=True), whole_step=True),
    Provider("optimus_cuda_graphs_step", _replayed(), needs_gpu=True),
    # Kernels that do not need one another, such as casts of weights, as one launch.
    Provider(
        "optimus_cuda_graphs_step_combo",
        _replayed(combo_kernels=True),
        needs_gpu=True,
        needs_inductor=True,
    ),
    Provider(
        "optimus_cuda_graphs_step_combo_pointwise",
        _replayed(combo_kernels=True, combo_kernels_pointwise_only=True),
        needs_gpu=True,
        needs_inductor=True,
    ),
    Provider("fused_compile", _compile, fused=True),
    Provider("fused_step_graph", _compile, fused=True, whole_step=True),
)
PROVIDERS = {provider.name: provider for provider in _ALL}
