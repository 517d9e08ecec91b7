"""Embedding tables looked up together and updated within the backward pass, by fbgemm.

A table of its own costs about fifty kernels a step: its lookup, the sort of its ids, the sum of its
gradients and its optimizer. fbgemm's table-batched embedding does this for all tables at once, in a
few kernels whatever their number.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.optim import OptimizerConfig

# fbgemm's counterparts of those optimizers whose step on the rows that were looked up is all of
# their step: Adam, momentum and weight decay change all other rows too, which fbgemm does not do.
_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
_POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}
# fbgemm reads rows as vectors of four numbers.
_WIDTH = 4


def objection(config: OptimizerConfig, embedding_dim: int) -> str | None:
    """Why tables of this width and optimizer cannot be fused without changing results, if so."""
    if config.name not in _OPTIMIZERS:
        return f"{config.name} updates rows that were not looked up, too"
    if not config.takes_sparse_gradients:
        return f"{config.name} with momentum or weight decay updates rows that were not looked up"
    if embedding_dim % _WIDTH:
        return f"embedding_dim is {embedding_dim}, not a multiple of {_WIDTH}"
    return None


class FusedTables:
    """One lookup for all tables of a pooling mode, with their optimizer in its backward pass.

    `weights` are the tables' parameters, (rows, D) float32 all on one device, in the order of the
    features; `poolings` says "sum" or "mean" for each. The parameters stay what they were for
    everyone else, but their memory becomes a view of fbgemm's: state dicts, loading and checks read
    and write the same numbers. They never get a gradient.

    Not a Module: it holds no parameter of its own. `optimizer` has the state and the learning rate.
    Raises ValueError where `objection` has one.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], poolings: Sequence[str], config: OptimizerConfig
    ) -> None:
        self.embedding_dim = weights[0].shape[1]
        reason = objection(config, self.embedding_dim)
        if reason is not None:
            raise ValueError(f"tables cannot be fused: {reason}")
        # Tables of one pooling mode beside each other; sorted() keeps their order otherwise.
        order = sorted(range(len(weights)), key=lambda i: poolings[i])
        self._groups = [(p, list(g)) for p, g in groupby(order, key=lambda i: poolings[i])]
        device = weights[0].device
        self._places: Tensor | None = None
        if order != list(range(len(order))):
            self._places = torch.tensor(order, device=device).argsort()
        plain = config.build(weights, "sparse")
        self._lookups = [
            _lookup([weights[i] for i in members], _POOLING[pooling], config, plain)
            for pooling, members in self._groups
        ]
        by_index = dict(zip(order, self._states(), strict=True))
        states = {weight: by_index[i] for i, weight in enumerate(weights)}
        self.optimizer = FusedOptimizer(plain, {w: s for w, s in states.items() if s is not None})
        self._lr: float | None = None

    def _states(self) -> Iterator[Tensor | None]:
        """fbgemm's accumulator of each table, (rows, 1) or (rows, D); None where it has none."""
        for lookup in self._lookups:
            sums = lookup.split_optimizer_states()
            if not sums:
                yield from (None for _ in lookup.embedding_specs)
            for (total,) in sums:
                yield total.view(total.shape[0], -1)

    # fbgemm's module changes its own attributes in each call, which Dynamo cannot trace.
    @torch.compiler.disable
    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Pooled embeddings (B, F, D) of `features`, whose keys are the tables' in their order."""
        if torch.is_grad_enabled():
            self._pass_on_learning_rate()
        parts = [self._pooled(features, i) for i in range(len(self._groups))]
        pooled = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return pooled if self._places is None else pooled.index_select(1, self._places)

    def _pooled(self, features: KeyedJaggedTensor, group: int) -> Tensor:
        if len(self._groups) > 1:
            features = features.permute(self._groups[group][1])
        values = self._lookups[group](features.values().long(), features.offsets().long())
        return values.view(features.stride(), -1, self.embedding_dim)

    def _pass_on_learning_rate(self) -> None:
        # Read where the pass begins whose backward makes the step: after any scheduler.
        lr = float(self.optimizer.param_groups[0]["lr"])
        if lr != self._lr:
            for lookup in self._lookups:
                lookup.set_learning_rate(lr)
            self._lr = lr


class FusedOptimizer(Optimizer):
    """The optimizer of fused tables, seen from outside: its groups and state, but no work to do.

    `plain` is the optimizer that would step on the same parameters otherwise. Groups and state
    have its layout, so a checkpoint of one loads into the other; `sums` are its accumulators by
    parameter, in fbgemm's memory.
    """

    def __init__(self, plain: Optimizer, sums: Mapping[Tensor, Tensor]) -> None:
        self._sums = dict(sums)
        super().__init__(plain.param_groups, plain.defaults)
        # Adagrad begins with a state, and fills its sums.
        for param, total in self._sums.items():
            own = plain.state.get(param, {})
            if "sum" in own:
                total.copy_(own["sum"])
            self.state[param] = {**own, "sum": total}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count the step: backward has made it.

        Raises RuntimeError where the tables were looked up by other means, and have gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            raise RuntimeError(
                "fused tables have gradients, so their last lookup was not the fused one: was the "
                "model moved to another device or dtype since its optimizers were made?"
            )
        steps = [state["step"] for state in self.state.values() if "step" in state]
        if steps:
            torch._foreach_add_(steps, 1)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a loaded state over into fbgemm's memory; what is not in it begins at 0."""
        super().__setstate__(state)
        for param, total in self._sums.items():
            own = self.state[param]
            total.copy_(own["sum"]) if "sum" in own else total.zero_()
            own["sum"] = total

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("fused tables and their optimizer cannot be copied or pickled")


def _lookup(
    weights: Sequence[nn.Parameter],
    pooling: PoolingMode,
    config: OptimizerConfig,
    plain: Optimizer,
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """fbgemm's module for `weights`, which become views of its memory."""
    device = weights[0].device
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    if device.type == "cpu":
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    specs = [(*weight.shape, *place) for weight in weights]
    # By way of the host, so that the device never holds the tables twice.
    values = [weight.detach().cpu() for weight in weights]
    for weight in weights:
        weight.data = weight.data.new_empty(0)
    with _quiet():
        lookup = SplitTableBatchedEmbeddingBagsCodegen(
            specs,
            optimizer=_OPTIMIZERS[config.name],
            learning_rate=config.lr,
            eps=plain.param_groups[0].get("eps", 0.0),
            pooling_mode=pooling,
            device=device,
            # As a table of its own does; the default would train on, with id 0 in place of another.
            bounds_check_mode=BoundsCheckMode.FATAL,
        )
    for weight, value, view in zip(weights, values, lookup.split_embedding_weights(), strict=True):
        view.copy_(value)
        weight.data = view
    return lookup


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the twenty lines that fbgemm tells the root logger about each module made."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        root.setLevel(level)
