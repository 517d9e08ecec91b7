"""Replay an optimizer's step as a CUDA graph.

The graph reads learning rates and gradients from fixed memory. Parameter groups go on holding
plain numbers, as schedulers, loggers and checkpoints know them: each number that has changed is
written to the graph's memory before a replay. Every step, replayed or not, computes with the rate
in that form, so a resumed run, which begins outside the graph, computes what an uninterrupted one
does.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Generator, Sequence
from itertools import repeat
from operator import is_not
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from optimus.capture import (
    MOST_CHANGES,
    MOST_RECORDINGS,
    Capture,
    CaptureError,
    Recorded,
    Results,
    Session,
    Settling,
)
from optimus.group_settings import GroupSettings
from optimus.targets import describe

# Those whose step count can be on the device; SGD counts none, but only its fused form reads a
# learning rate there.
_CAPTURABLE: tuple[type[Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.SGD,
)

Group = dict[str, Any]


def objection(optimizer: Optimizer, capture: Capture) -> str:
    """Why the step of `optimizer` cannot be recorded; empty if it can."""
    kind = type(optimizer)
    if kind not in _CAPTURABLE:
        return f"{kind.__name__} is not known to step without the host"
    groups = optimizer.param_groups
    if kind is torch.optim.SGD and capture.capturable and not all(g["fused"] for g in groups):
        return "SGD reads its learning rate on the host, unless it is made with fused=True"
    if any(group.get("differentiable") for group in groups):
        return f"{kind.__name__} is differentiable"
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        return "its learning rate is a tensor already"
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # private names
        if getattr(optimizer, name, None):
            return f"{kind.__name__} has hooks around its step"
    return next((r for g in groups if (r := _failure_of_trial(optimizer, g, capture))), "")


def _failure_of_trial(optimizer: Optimizer, group: Group, capture: Capture) -> str:
    """Why an optimizer like this one fails on two numbers; empty if it does not."""
    types = {p.dtype for p in group["params"]} or {torch.float32}
    numbers = [nn.Parameter(torch.ones(2, dtype=t, device=capture.device)) for t in types]
    try:
        trial = cast("Any", type(optimizer))([group | {"params": numbers}])
        stepper = _Form(trial, capture)
        for _ in range(2):
            for number in numbers:
                number.grad = torch.ones_like(number)
            with stepper.taken():
                trial.step()
    except Exception as error:  # whatever it is, it must not happen in a step of training
        return f"{type(optimizer).__name__} cannot step in a form to record: {describe(error)}"
    return ""


class _Form:
    """The form of an optimizer that a recording needs; it has it within `taken` only."""

    def __init__(self, optimizer: Optimizer, capture: Capture) -> None:
        self._optimizer = optimizer
        self._capture = capture
        self._rates: list[torch.Tensor] = []
        self._values: list[float] = []

    def write_rates(self) -> None:
        """Bring the groups' learning rates to the device, where they have changed."""
        values = [float(group["lr"]) for group in self._optimizer.param_groups]
        if values == self._values:
            return
        if len(values) != len(self._rates):
            kind, device = self._capture.rate_type, self._capture.device
            self._rates = [torch.tensor(v, dtype=kind, device=device) for v in values]
        else:
            for rate, old, new in zip(self._rates, self._values, values, strict=True):
                if old != new:
                    rate.fill_(new)
        self._values = values

    @contextlib.contextmanager
    def taken(self) -> Generator[None]:
        """Within it the optimizer's step can be recorded, or run in the same way."""
        self.write_rates()
        self._bring_steps()
        with self.swapped():
            yield

    @contextlib.contextmanager
    def swapped(self) -> Generator[None]:
        """Within it the groups hold rates on the device."""
        groups = list(self._optimizer.param_groups)
        names = ("lr", "capturable")
        own: list[Group] = [{n: group[n] for n in names if n in group} for group in groups]
        # PyTorch's advice not to set it without a graph is not for the user.
        self._optimizer.__dict__["_warned_capturable_if_run_uncaptured"] = True
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = self._capture.capturable or group["capturable"]
            yield
        finally:
            for group, values in zip(groups, own, strict=True):
                group.update(values)

    def _bring_steps(self) -> None:
        """The counts of steps, which begin on the host."""
        if not self._capture.capturable:
            return
        for state in self._optimizer.state.values():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and step.device.type != self._capture.device.type:
                state["step"] = step.to(self._capture.device)

    def return_steps(self) -> None:
        """Counts of steps to where the optimizer itself keeps them."""
        for group in self._optimizer.param_groups:
            if _counts_on_host(group):
                for parameter in group["params"]:
                    state = self._optimizer.state.get(parameter)
                    if state and isinstance(state.get("step"), torch.Tensor):
                        state["step"] = state["step"].cpu()


class GraphedOptimizer:
    """Replaces the `step` of an optimizer, until `release`. `objection` must have had none."""

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        self.replays = 0
        self.outside = 0
        self.declined = ""
        self.last_step = 0
        self.optimizer = optimizer
        self._session = session
        self._released = False
        self._form = _Form(optimizer, session.capture)
        self._settling = Settling()
        self._recordings = 0
        self._key: Any = None
        self._recorded: Recorded | None = None
        self._gradients: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._settings: GroupSettings | None = None
        self._own: Callable[[], Any] = optimizer.step
        self._put = [_Put(optimizer, "step", self._replacement())]
        is_usual = type(optimizer).zero_grad is Optimizer.zero_grad
        if is_usual and "zero_grad" not in optimizer.__dict__:
            self._put.append(_Put(optimizer, "zero_grad", _quick_zero_grad(optimizer)))

    def release(self) -> None:
        """Give the optimizer its own step back."""
        if self._released:
            return
        self.drop()
        self._released = True  # whoever has wrapped this step meanwhile still calls it
        for put in self._put:
            put.take_back()
        self._form.return_steps()

    def drop(self) -> None:
        """Forget what was recorded."""
        self._recorded = None
        self._gradients = []

    def _replacement(self) -> Any:
        # A method, with the marks of the own one: schedulers look for both.
        @functools.wraps(self._own)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._run(closure)

        return types.MethodType(step, self.optimizer)

    def _run(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_plain:
            self._own()
        else:
            self._update()
        return loss

    @property
    def _is_plain(self) -> bool:
        return bool(self._released or self.declined or self._session.failure)

    def _update(self) -> None:
        parameters, gradients = self._parameters()
        key = self._describe(parameters)
        if self._recorded is not None and key == self._key:
            self._settling.replayed()
        elif not (
            self._settling.is_settled(key, self._recorded is not None)
            and self._record(parameters, gradients, key)
        ):
            self._run_outside(parameters)
            return
        self._replay(gradients)

    def _run_outside(self, parameters: Sequence[torch.Tensor]) -> None:
        self.outside += 1
        if self._is_plain:
            self._own()
            return
        with self._form.taken():
            self._own()
        self._settling.see(self._describe(parameters))
        if self._settling.changes > MOST_CHANGES:
            self._decline("its settings or parameters change from step to step")

    def _parameters(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that have a gradient, and the gradients."""
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in everything]
        if all(map(is_not, gradients, repeat(None))):
            return everything, cast("list[torch.Tensor]", gradients)
        some = [(p, g) for p, g in zip(everything, gradients, strict=True) if g is not None]
        return [p for p, _ in some], [g for _, g in some]

    def _describe(self, parameters: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What must be the same in each replay: parameters, states and settings but the rate."""
        if self._settings is None or not self._settings.still_hold(self.optimizer.param_groups):
            self._settings = GroupSettings(self.optimizer.param_groups)
        # All states: to look up those of the parameters would take longer than the rest.
        return (
            tuple(map(id, parameters)),
            tuple(map(torch.Tensor.data_ptr, parameters)),
            tuple(map(id, self.optimizer.state.values())),
            self._settings.words,
        )

    def _decline(self, reason: str) -> None:
        self.declined = reason
        kind = type(self.optimizer).__name__
        self._session.note(f"the step of {kind} stays outside CUDA graphs: {reason}")
        self.drop()
        self._form.return_steps()

    def _record(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], key: Any
    ) -> bool:
        if any(gradient.layout != torch.strided for gradient in gradients):
            self._decline("some gradients are sparse")
            return False
        if self._recordings == MOST_RECORDINGS:
            self._decline(f"its settings or parameters have changed {MOST_RECORDINGS} times")
            return False
        self.drop()
        self._recordings += 1
        static = self._session.static
        self._gradients = [g if g.data_ptr() in static else g.clone() for g in gradients]
        self._addresses = [g.data_ptr() for g in self._gradients]
        self._form.write_rates()
        work = functools.partial(self._work, list(parameters), list(self._gradients))
        try:
            (self._recorded,) = self._session.record([work])
        except CaptureError as error:
            kind = type(self.optimizer).__name__
            self._session.fail(f"the step of {kind} could not be recorded: {error}")
            self._form.return_steps()
            return False
        self._key = key
        return True

    def _work(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> Results:
        """The optimizer's own step on fixed gradients."""
        own = [p.grad for p in parameters]
        try:
            _set_gradients(parameters, gradients)
            with self._form.swapped():
                self._own()
        finally:
            _set_gradients(parameters, own)
        return []

    def _replay(self, found: Sequence[torch.Tensor]) -> None:
        self.replays += 1
        self.last_step = self._session.step
        self._form.write_rates()
        addresses = list(map(torch.Tensor.data_ptr, found))
        if addresses != self._addresses:
            pairs = enumerate(zip(addresses, self._addresses, strict=True))
            moved = [i for i, (now, then) in pairs if now != then]
            with torch.no_grad():
                torch._foreach_copy_([self._gradients[i] for i in moved], [found[i] for i in moved])
        cast(Recorded, self._recorded).replay()


class _Put:
    """A method put in the place of an optimizer's own."""

    def __init__(self, optimizer: Optimizer, name: str, method: Any) -> None:
        self._attributes = optimizer.__dict__
        self._name = name
        self._method = method
        self._before = self._attributes.get(name)
        self._attributes[name] = method

    def take_back(self) -> None:
        """Put back what was there, unless somebody else has replaced the method meanwhile."""
        if self._attributes.get(self._name) is self._method:
            del self._attributes[self._name]
            if self._before is not None:
                self._attributes[self._name] = self._before


def _quick_zero_grad(optimizer: Optimizer) -> Any:
    """What the optimizer's own does, without the host time that its profiling takes."""
    own = optimizer.zero_grad

    @functools.wraps(own)
    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none:
            own(set_to_none=False)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return types.MethodType(zero_grad, optimizer)


def _set_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def host_counts(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict hook: counts of steps where the optimizer itself would have kept them."""
    states = dict(saved["state"])
    for group in saved["param_groups"]:
        for number in group["params"] if _counts_on_host(group) else ():
            step = states.get(number, {}).get("step")
            if isinstance(step, torch.Tensor) and step.device.type != "cpu":
                states[number] = states[number] | {"step": step.cpu()}
    return saved | {"state": states}


def _counts_on_host(group: Group) -> bool:
    return not group.get("fused") and not group.get("capturable")
