"""What running one node does besides returning a value: writes, randomness, global state.

Torch IR is not functional. The answers here are what `optimus.legality` builds its order of
dependencies from; whatever is not known to be pure is taken to touch everything.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from optimus.ops import target_name


@dataclass(frozen=True)
class Effects:
    """`writes`: nodes whose memory is written. `random`: draws from a generator.

    `barrier`: nothing may be moved across it (a change of grad mode or autocast, an unknown call).
    """

    writes: tuple[Node, ...] = ()
    random: bool = False
    barrier: bool = False

    @property
    def pure(self) -> bool:
        """Whether the node only computes its value, so that it may be dropped when unused."""
        return not (self.writes or self.random or self.barrier)


PURE = Effects()


def effects_of(node: Node) -> Effects:
    """The effects of running `node`."""
    if node.op in ("placeholder", "get_attr", "output"):
        return PURE
    if node.op == "call_method":
        return _method_effects(node, str(node.target))
    if node.op == "call_function" and callable(node.target):
        return _function_effects(node, node.target)
    return _unknown(node)


def _method_effects(node: Node, name: str) -> Effects:
    if name in _OPAQUE_METHODS or not hasattr(torch.Tensor, name):
        return _unknown(node)
    random = is_random(name)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return Effects(_tensors(node.args[:1]), random)
    return Effects((), random) if random else PURE


def _function_effects(node: Node, target: Callable[..., Any]) -> Effects:
    if isinstance(target, torch._ops.OpOverload):
        return _schema_effects(node, target._schema, is_random(target))
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _packet_effects(node, target)
    nature = _nature(target)
    if nature.unknown:
        return _unknown(node)
    writes = _tensors(node.args[:1]) if nature.in_place else ()
    if "out" in node.kwargs:
        writes += _tensors(node.kwargs["out"])
    if nature.flags is not None:
        writes += _flagged_writes(node, nature.flags)
    random = nature.random and not _is_attention_without_dropout(node, nature.name)
    return Effects(writes, random) if writes or random else PURE


@dataclass(frozen=True)
class _Nature:
    """What holds for all calls of a function. `flags`: its parameters, if some of them may make it
    write."""

    name: str = ""
    unknown: bool = False
    in_place: bool = False
    random: bool = False
    flags: inspect.Signature | None = None


@cache
def _nature(target: Callable[..., Any]) -> _Nature:
    name = getattr(target, "__name__", "")
    if target in _IN_PLACE_OPERATORS:
        return _Nature(name, in_place=True)
    if not _known_pure_home(target) or _is_opaque(target, name):
        return _Nature(name, unknown=True)
    signature = inspect.signature(target) if inspect.isfunction(target) else None
    if signature is not None and _FLAGS.isdisjoint(signature.parameters):
        signature = None
    in_place = name.endswith("_") and not name.endswith("__")
    return _Nature(name, False, in_place, is_random(name), signature)


_FLAGS = {"inplace", "running_mean", "max_norm"}


def _is_attention_without_dropout(node: Node, name: str) -> bool:
    if name != "scaled_dot_product_attention":
        return False
    probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return isinstance(probability, int | float) and probability == 0


def _packet_effects(node: Node, packet: torch._ops.OpOverloadPacket) -> Effects:
    """Those of an operator whose overload is chosen by its arguments when it runs."""
    names = [n for n in packet.overloads() if "out" in node.kwargs or not n.endswith("out")]
    overloads = [getattr(packet, name) for name in names]
    known = all(_schema_effects(node, o._schema, is_random(o)).pure for o in overloads)
    return PURE if known else _unknown(node)


def _schema_effects(node: Node, schema: torch.FunctionSchema, random: bool) -> Effects:
    name = schema.name.removeprefix("aten::")
    if name in _LYING_KERNELS or _is_check(name):
        return _unknown(node)
    writes: tuple[Node, ...] = ()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else None
            writes += _tensors(node.kwargs.get(argument.name, given))
    writes_nothing_it_says = schema.is_mutable and not writes
    return Effects(writes, random, barrier=writes_nothing_it_says)


def _flagged_writes(node: Node, signature: inspect.Signature) -> tuple[Node, ...]:
    """torch.nn.functional's arguments that turn a pure function into one that writes."""
    try:
        bound = signature.bind(*node.args, **node.kwargs)
    except TypeError:
        return _tensors((node.args, node.kwargs))
    bound.apply_defaults()
    values = bound.arguments
    writes: tuple[Node, ...] = ()
    if values.get("inplace", False) is not False:
        writes += _tensors(values.get("input"))
    if "running_mean" in values and (
        values.get("training", False) is not False
        or values.get("use_input_stats", False) is not False
    ):
        writes += _tensors((values["running_mean"], values["running_var"]))
    if values.get("max_norm") is not None:
        writes += _tensors(values.get("weight"))
    return writes


def is_random(target: str | torch._ops.OpOverload) -> bool:
    """Whether a method, function (by name) or operator overload draws random numbers."""
    known = _RANDOM_BY_NAME.get(target) if isinstance(target, str) else None
    return _is_tagged(target, torch.Tag.nondeterministic_seeded) if known is None else known


def turns_in_place(node: Node) -> bool:
    """Whether the call makes its argument itself another view: `x.t_()`, `x.detach_()`.

    What the tensor was before cannot be read off its fake value any more.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _is_tagged(target, torch.Tag.inplace_view)
    return node.op.startswith("call") and _is_tagged(target_name(target), torch.Tag.inplace_view)


@cache
def _is_tagged(target: str | torch._ops.OpOverload, tag: torch.Tag) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return tag in target.tags
    packet = getattr(torch.ops.aten, target, None) if target.isidentifier() else None
    # `__eq__` and its like are methods of every Python object, this one among them.
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(tag in getattr(packet, overload).tags for overload in packet.overloads())


# Composite functions, which have no operator of their name to ask.
_RANDOM_BY_NAME: dict[str, bool] = {
    "gumbel_softmax": True,
    "multi_head_attention_forward": True,
    "seed": True,
    "manual_seed": True,
    "dropout1d": True,
    "dropout2d": True,
    "dropout3d": True,
}

_OPAQUE_METHODS = {
    "backward",
    "register_hook",
    "requires_grad_",
    "retain_grad",
    "resize_",
    "resize_as_",
    "set_",
    "share_memory_",
    "detach_",
    "untyped_storage",
    "storage",
    "data_ptr",
}
_OPAQUE_FUNCTIONS = {"setattr", "delattr", "manual_seed", "seed", "set_default_dtype"}

# Operators that update running statistics without their schema saying so.
_LYING_KERNELS = {
    "batch_norm",
    "instance_norm",
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "batch_norm_update_stats",
    "_batch_norm_impl_index",
}

_IN_PLACE_OPERATORS = {
    operator.setitem,
    operator.delitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.imatmul,
    operator.ilshift,
    operator.irshift,
}

# Modules whose functions compute a value and nothing else, but for the flags read above. Context
# switches live elsewhere (torch._C, torch.amp.autocast_mode) and stay barriers.
_PURE_HOMES = {
    "torch",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._special",
    "torch._C._fft",
    "torch.functional",
    "torch.nn.functional",
    "_operator",
    "math",
}
_PURE_BUILTINS: set[Any] = {getattr, len, max, min, abs, int, float, bool, slice}


def _is_opaque(target: Callable[..., Any], name: str) -> bool:
    if name in _LYING_KERNELS:  # torch.nn.functional's say what they write by their flags
        return not inspect.isfunction(target)
    return name in _OPAQUE_FUNCTIONS or _is_check(name)


def _is_check(name: str) -> bool:
    """A check is kept for its effect, which is to raise."""
    return "assert" in name or name.startswith(("_check", "sym_constrain"))


def _known_pure_home(target: Callable[..., Any]) -> bool:
    if _is_tensor_method(target):
        return True
    home = getattr(target, "__module__", None)
    if home is None:  # torch's own built-ins carry their type's name instead of a module
        owner = getattr(target, "__self__", None)
        return isinstance(owner, type) and owner.__module__ == "torch._C"
    if home == "builtins":
        return target in _PURE_BUILTINS
    if inspect.isfunction(target) and home in ("torch", "torch.nn.functional"):
        return getattr(torch, target.__name__, None) is target or hasattr(F, target.__name__)
    return home in _PURE_HOMES


def _is_tensor_method(target: Callable[..., Any]) -> bool:
    name = getattr(target, "__name__", "")
    return name not in _OPAQUE_METHODS and getattr(torch.Tensor, name, None) is target


def _unknown(node: Node) -> Effects:
    return Effects(_tensors((node.args, node.kwargs)), random=True, barrier=True)


def _tensors(values: Any) -> tuple[Node, ...]:
    """All nodes inside nested arguments."""
    found: list[Node] = []
    torch.fx.map_arg(values, found.append)
    return tuple(found)
