"""Operators of PyTorch's that are written in Python, with little work on the host in each call.

As `torch.library.custom_op` makes them, but for its checks in each call: a third of the time. Their
schema says that they write to nothing and return memory of their own; the tests hold them to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from kernels.autocast import LIBRARY, NAMESPACE

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """The operator `kernels::name` on all devices; called as the function that computes it."""

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        schema = torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self._name = f"{NAMESPACE}::{name}"
        self._call = getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._call(*args, **kwargs)
        return result

    def register_fake(self, function: Callable[P, R]) -> Callable[P, R]:
        """Say with `function` what the result looks like."""
        torch.library.register_fake(self._name, function, lib=LIBRARY)
        return function

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """As torch.library.register_autograd."""
        torch.library.register_autograd(
            self._name, backward, setup_context=setup_context, lib=LIBRARY
        )


def operator(
    name: str, *, differentiable: bool = True
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make the decorated function an operator.

    `register_autograd` says its gradient; where it is not `differentiable` asking for one raises
    NotImplementedError.
    """

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"{NAMESPACE}::{name} has no gradient")

    def make(function: Callable[P, R]) -> Operator[P, R]:
        made = Operator(name, function)
        if not differentiable:
            made.register_autograd(refuse)
        return made

    return make
