"""Whether anything in a Lightning run looks at the gradients of single parameters.

An optimizer that steps on packs leaves `parameter.grad` empty; that is only done where nobody asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer


def optimizers_for_packs(trainer: Any, module: Any, others: Iterable[Any]) -> list[Optimizer]:
    """The Trainer's optimizers if they may step on packs, else none.

    `others` are the callbacks besides Optimus. Under several processes gradients are reduced by
    parameter, and in manual optimisation the module handles them itself.
    """
    if trainer.world_size > 1 or not module.automatic_optimization:
        return []
    if any(_reads_gradients(reader) for reader in (module, *others)):
        return []
    return list(trainer.optimizers)


def _reads_gradients(reader: Any) -> bool:
    return any(_is_users_own(getattr(type(reader), hook, None)) for hook in _HOOKS)


def _is_users_own(hook: Any) -> bool:
    home = getattr(hook, "__module__", None)
    return home is not None and not home.startswith(("lightning.", "pytorch_lightning."))


# What Lightning calls between backward and the end of the optimizer's step.
_HOOKS = (
    "backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
