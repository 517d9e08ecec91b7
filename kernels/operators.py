"""Operators of PyTorch's that are written in Python, with little work on the host in each call.

As `torch.library.custom_op` makes them, but for its checks in each call: a third of the time. Their
schema says that they write to nothing and return memory of their own; the tests hold them to it.

To torch.compile an operator is one opaque call, which costs the host several times a kernel of
Inductor's. One that is `traced` is opened up instead, as `torch.library.triton_op` are: Inductor
sees the kernels that it launches, and launches them as its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kernels.autocast import LIBRARY, NAMESPACE
from kernels.launch import can_launch, hint, tracing

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """The operator `kernels::name` on all devices; called as the function that computes it."""

    def __init__(self, name: str, function: Callable[P, R], traced: bool) -> None:
        schema = torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self._name = f"{NAMESPACE}::{name}"
        self._function = function
        self._call = getattr(getattr(torch.ops, NAMESPACE), name).default
        if traced:
            self._register_trace()

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

    def _register_trace(self) -> None:
        try:
            from torch._subclasses.functional_tensor import FunctionalTensorMode  # a private name
        except ImportError:
            return  # it stays one call

        def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
            if _is_exporting() or not self._is_tuned(args, kwargs or {}):
                return mode.__torch_dispatch__(op, types, args, kwargs)
            with mode, tracing():
                return self._function(*args, **(kwargs or {}))

        torch.library.register_torch_dispatch(self._name, FunctionalTensorMode, rule, lib=LIBRARY)

    def _is_tuned(self, args: Any, kwargs: Any) -> bool:
        """Whether kernels will run on such arguments; if so, their tile shapes are chosen by now.

        They are chosen by running the operator once on tensors that look the same.
        """
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not tensors or not all(t.is_cuda for t in tensors) or not can_launch(*tensors):
            return False
        try:
            from torch.utils._python_dispatch import _disable_current_modes  # a private name

            with _disable_current_modes(), tracing(False), torch.no_grad():
                like = pytree.tree_map(_stand_in, (args, kwargs))
                self._function(*like[0], **like[1])
        except Exception as error:  # whatever it is: as one call it may still run
            log.info("%s is not opened up: %r", self._name, error)
            return False
        return True


def _is_exporting() -> bool:
    """Whether torch.export traces, which could not write down the launch of a kernel."""
    try:
        from torch.export._trace import custom_triton_ops_decomposition_disabled  # a private name
    except ImportError:
        return False
    return bool(custom_triton_ops_decomposition_disabled())


def _stand_in(value: Any) -> Any:
    """A real tensor that looks like a traced one."""
    if not isinstance(value, Tensor):
        return value
    sizes, strides = tuple(map(hint, value.shape)), tuple(map(hint, value.stride()))
    offset = hint(value.storage_offset()) % 16  # elements: as well aligned, by which tiles differ
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    room = torch.empty(offset + max(reach, 0) + 1, dtype=value.dtype, device=value.device)
    return room.as_strided(sizes, strides, offset)


def operator(
    name: str, *, differentiable: bool = True, traced: bool = False
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make the decorated function an operator.

    `register_autograd` says its gradient; where it is not `differentiable` asking for one raises
    NotImplementedError. A `traced` one must read nothing of its tensors on the host, addresses
    included, and launch kernels that take tensors one by one.
    """

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"{NAMESPACE}::{name} has no gradient")

    def make(function: Callable[P, R]) -> Operator[P, R]:
        made = Operator(name, function, traced)
        if not differentiable:
            made.register_autograd(refuse)
        return made

    return make
