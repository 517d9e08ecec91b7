"""Which CUDA graphs a Lightning run gets, or why it gets none."""

from __future__ import annotations

from typing import Any

import torch

from optimus.capture import Capture, capture_for
from optimus.model_graphs import ModelGraphs
from optimus.settings import Settings
from optimus.step_graphs import StepGraphs
from optimus.takeover import ChosenGraphs


def graphs_for(
    settings: Settings, trainer: Any, module: Any, capture: Capture | None
) -> ChosenGraphs:
    """What `settings.cuda_graphs` asks for, in this Trainer's run of `module`.

    `capture` records; None stands for what there is on the Trainer's device.
    """
    device: torch.device = trainer.strategy.root_device
    if settings.cuda_graphs == "off":
        return ChosenGraphs()
    if settings.cuda_graphs == "model":
        return ChosenGraphs(ModelGraphs(device))
    found = capture or capture_for(device)
    objection = found if isinstance(found, str) else _objection(trainer, module)
    if isinstance(found, str) or objection:
        return ChosenGraphs(objection=objection)
    return ChosenGraphs(StepGraphs(found), lambda: list(trainer.optimizers))


def _objection(trainer: Any, module: Any) -> str:
    """What of a run does not go together with replayed steps."""
    if not module.automatic_optimization:
        return "optimisation is manual"
    if trainer.world_size > 1 or not _is_plain(trainer.strategy):
        return f"the strategy {type(trainer.strategy).__name__} takes part in the step"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return f"precision={trainer.precision} scales the loss, on what the host reads of gradients"
    if torch.is_anomaly_enabled():
        return "detect_anomaly looks at every gradient on the host"
    return ""


def _is_plain(strategy: Any) -> bool:
    # By name, because there are two packages of Lightning.
    return any(kind.__name__ == "SingleDeviceStrategy" for kind in type(strategy).__mro__)
