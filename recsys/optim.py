"""Optimizers for tables and dense layers, joined into one, and their learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator a row: fbgemm's EXACT_ROWWISE_ADAGRAD as a plain optimizer.

    sum_r += mean(grad_r ** 2);  row_r -= lr * grad_r / (sqrt(sum_r) + eps)

    State is 1/D of Adagrad's. Takes dense and sparse gradients of 2-D parameters.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim != 2:
                    raise ValueError(f"rowwise_adagrad needs 2-D tables, got {tuple(param.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluate(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["sum"] = torch.zeros(param.shape[0], 1, dtype=param.dtype, device=param.device)
        if grad.is_sparse:
            _update_rows(param, grad.coalesce(), state["sum"], group)
            return
        if group["weight_decay"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        state["sum"].add_(grad.square().mean(dim=1, keepdim=True))
        param.addcdiv_(grad, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])


def _update_rows(param: Tensor, grad: Tensor, total: Tensor, group: Mapping[str, Any]) -> None:
    """One step on the rows of a coalesced sparse gradient; weight decay touches only these."""
    rows, values = grad.indices()[0], grad.values()
    if group["weight_decay"]:
        values = values.add(param[rows], alpha=group["weight_decay"])
    total.index_add_(0, rows, values.square().mean(dim=1, keepdim=True))
    step = values / total[rows].sqrt_().add_(group["eps"])
    param.index_add_(0, rows, step, alpha=-group["lr"])


# What each optimizer takes beside lr and weight_decay.
_OPTIONS: dict[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "sgd": (SGD, ("momentum",)),
    "adagrad": (Adagrad, ("eps",)),
    "rowwise_adagrad": (RowWiseAdagrad, ("eps",)),
    "adam": (Adam, ("eps", "betas")),
    "adamw": (AdamW, ("eps", "betas")),
}
SPARSE_OPTIMIZERS = tuple(_OPTIONS)
DENSE_OPTIMIZERS = tuple(name for name in _OPTIONS if name != "rowwise_adagrad")


@dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer and its schedule. Options left at None are the optimizer's own defaults.

    The learning rate rises linearly over `warmup_steps` optimizer steps, stays, and from
    `decay_start` (None: right after the warm-up) falls to 0 over `decay_steps` as
    (1 - progress) ** decay_power. `decay_steps` 0 means no decay, -1 until the end of training.
    MLPerf's DLRM: warmup_steps=2750, decay_start=49315, decay_steps=27772, decay_power=2.
    """

    name: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    eps: float | None = None
    betas: tuple[float, float] | None = None
    momentum: float | None = None
    warmup_steps: int = 0
    decay_start: int | None = None
    decay_steps: int = 0
    decay_power: float = 2.0

    def __post_init__(self) -> None:
        if self.name not in _OPTIONS:
            raise ValueError(_unknown(self.name, SPARSE_OPTIMIZERS))
        if not self.lr > 0:
            raise ValueError(f"{self.name}: lr is {self.lr}, must be above 0")
        if self.warmup_steps < 0 or self.decay_steps < -1:
            raise ValueError(
                f"{self.name}: warmup_steps is {self.warmup_steps} and decay_steps "
                f"{self.decay_steps}, must be at least 0 and -1"
            )
        takes = _OPTIONS[self.name][1]
        for option in ("eps", "betas", "momentum"):
            if getattr(self, option) is not None and option not in takes:
                raise ValueError(f"{self.name} has no option {option}, it has {', '.join(takes)}")

    @classmethod
    def of(cls, config: OptimizerConfig | Mapping[str, Any]) -> OptimizerConfig:
        """`config` itself, or one made of a mapping (as a configuration file or checkpoint has)."""
        if isinstance(config, OptimizerConfig):
            return config
        known = cls.__dataclass_fields__
        for key in config:
            if key not in known:
                raise ValueError(f"optimizer option: {_unknown(str(key), tuple(known))}")
        options = dict(config)
        if options.get("betas") is not None:
            options["betas"] = tuple(options["betas"])
        return cls(**options)

    @property
    def takes_sparse_gradients(self) -> bool:
        """Whether steps on sparse gradients give exactly what steps on dense ones would."""
        exact = self.name in {"adagrad", "rowwise_adagrad"}
        return (exact or (self.name == "sgd" and not self.momentum)) and not self.weight_decay

    def build(
        self, params: Iterable[nn.Parameter], group: str, sparse_gradients: bool = False
    ) -> Optimizer:
        """The optimizer over `params`, as one parameter group called `group`."""
        params = list(params)
        cls, takes = _OPTIONS[self.name]
        options = {key: getattr(self, key) for key in takes if getattr(self, key) is not None}
        if cls is not RowWiseAdagrad and not sparse_gradients and params:
            kind: Any = cls
            options["fused"] = all(fused_works(kind, p.device, p.dtype) for p in params) or None
        groups = [{"params": params, "name": group}]
        make: Any = cls  # the base class declares none of these arguments
        return make(groups, lr=self.lr, weight_decay=self.weight_decay, **options)

    def schedule(self, total_steps: float) -> WarmupPolyDecay:
        """The learning rate's factor by step; `total_steps` serves decay_steps=-1."""
        if self.decay_steps == -1 and math.isinf(total_steps):
            raise ValueError(
                f"{self.name}: decay_steps=-1 decays until the end of training, which is not "
                "known: set max_epochs or max_steps, or give a number of steps"
            )
        start = self.warmup_steps if self.decay_start is None else self.decay_start
        steps = max(1, int(total_steps) - start) if self.decay_steps == -1 else self.decay_steps
        return WarmupPolyDecay(self.warmup_steps, start, steps, self.decay_power)


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name, known, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"{name!r} is unknown{hint} (one of {', '.join(known)})"


@cache
def fused_works(cls: type[Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has a fused `cls` for the device, found by one step on one number.

    Which optimizer is fused where changes from release to release and no public function says.
    """
    param = nn.Parameter(torch.ones(1, device=device, dtype=dtype))
    param.grad = torch.ones_like(param)
    try:
        cast(Any, cls)([param], fused=True).step()
    except (RuntimeError, TypeError):
        return False
    return True


class WarmupPolyDecay:
    """Factor of the learning rate at optimizer step 0, 1, ...; see `OptimizerConfig`.

    A plain object, because LambdaLR puts such an object's attributes into the checkpoint: a
    resumed run goes on with the schedule it was started with.
    """

    def __init__(self, warmup: int, start: int, steps: int, power: float) -> None:
        self.warmup = warmup
        self.start = start
        self.steps = steps
        self.power = power

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if not self.steps or step < self.start:
            return 1.0
        return max(0.0, 1 - (step - self.start) / self.steps) ** self.power


class JointOptimizer(Optimizer):
    """Several optimizers that step as one.

    Lightning's automatic optimisation, its gradient clipping and accumulation, GradScaler and
    learning rate schedulers each know one optimizer. This is one to them: its parameter groups
    are those of `optimizers`, and its state dict has torch's own layout. (TorchRec's
    CombinedOptimizer would evaluate Lightning's closure, forward and backward, once for each
    optimizer, leaves the parameter groups out of its state and refuses to load state into an
    optimizer that has not stepped.)

    Code that has to know what each parameter is updated by looks into `optimizers`.
    """

    # How a step is computed, not what it computes: a property of the machine, so a checkpoint of
    # one machine must not set it on another.
    _IMPLEMENTATION = ("fused", "foreach", "capturable")

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for o in optimizers for group in o.param_groups], {})
        self._adopt_groups()

    def _adopt_groups(self) -> None:
        # The very dicts of the inner optimizers: a scheduler's new rate reaches them.
        self.param_groups = [group for o in self.optimizers for group in o.param_groups]

    @property  # type: ignore[override]
    def state(self) -> dict[Tensor, Any]:
        """State by parameter. A fresh dict: the inner ones are filled at the first step."""
        return {param: value for o in self.optimizers for param, value in o.state.items()}

    @state.setter
    def state(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: Mapping[Tensor, Any]
    ) -> None:
        # The base class assigns an empty one when made; what it loads goes through __setstate__.
        if value:
            raise AttributeError("the state of a JointOptimizer is that of its optimizers")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluate(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the base class, while this is made: new groups belong to an inner optimizer."""
        if any(param_group is group for o in self.optimizers for group in o.param_groups):
            super().add_param_group(param_group)
            return
        raise NotImplementedError("add the group to one of `optimizers` before joining them")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, on this or another kind of device."""
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):
            pairs = zip(groups, self.param_groups, strict=True)
            groups = [saved | self._implementation_of(own) for saved, own in pairs]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _implementation_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: group[key] for key in self._IMPLEMENTATION if key in group}

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optimizers" in state:  # a copy or pickle
            super().__setstate__(state)
            self._adopt_groups()
            return
        first = 0
        for optimizer in self.optimizers:
            groups = state["param_groups"][first : first + len(optimizer.param_groups)]
            first += len(groups)
            params = {param for group in groups for param in group["params"]}
            own = {param: value for param, value in state["state"].items() if param in params}
            optimizer.state.clear()
            optimizer.state.update(own)
            optimizer.__setstate__({"state": optimizer.state, "param_groups": groups})
        self._adopt_groups()


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def scheduler(joint: JointOptimizer, *schedules: WarmupPolyDecay) -> LambdaLR:
    """The schedules, one for each of the joint optimizer's parameter groups, as one scheduler."""
    return LambdaLR(joint, list(schedules))
