"""The vocabulary of Torch IR: which functions, methods and operators spell one operation.

Dynamo records a program as its author wrote it: `torch.relu(x)`, `F.relu(x)`, `x.relu()`. Here each
operation has one entry: its canonical function, its parameters with their defaults, and its other
spellings. Patterns anchor on operation names and read arguments by name, whatever the spelling.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.fx import Node

Kind = Literal["pointwise", "view", "join", "reduction", "norm", "gemm", "random", "other"]
Target = Callable[..., Any] | str
"""What a node calls: a function, or the name of a tensor method."""


@dataclass(frozen=True)
class Op:
    """One operation: `target` is its canonical function, `signature` that function's parameters."""

    name: str
    target: Callable[..., Any]
    kind: Kind
    signature: inspect.Signature
    parameters: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.signature.parameters))

    def build(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Canonical `(args, kwargs)`: positional in signature order, trailing defaults left out."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        required = 0
        for name, parameter in self.signature.parameters.items():
            value = values[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                args.extend(value)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                kwargs |= {} if _is_default(parameter, value) else {name: value}
            else:
                args.append(value)
                required = required if _is_default(parameter, value) else len(args)
        has_rest = any(p.kind is p.VAR_POSITIONAL for p in self.signature.parameters.values())
        return tuple(args if has_rest else args[:required]), kwargs


@dataclass(frozen=True)
class _Spelling:
    op: Op
    signature: inspect.Signature


_SPELLINGS: dict[Target, _Spelling] = {}
OPS: dict[str, Op] = {}


def op_of(node: Node) -> Op | None:
    """The operation that `node` calls under any of its spellings; None for what is not listed."""
    spelling = _spelling(node)
    return spelling.op if spelling is not None else None


def arguments(node: Node) -> dict[str, Any] | None:
    """All of the call's arguments by canonical name, defaults filled in.

    None when the operation is not listed, or when the call says something that the canonical form
    cannot (an in-place flag, an `out=`, a scalar where a tensor stands, a wrong number of
    arguments).
    """
    spelling = _spelling(node)
    return _bind(spelling, node, writes=False) if spelling is not None else None


def out_of_place(node: Node) -> tuple[Op, dict[str, Any]] | None:
    """The operation and arguments that compute what an in-place call writes to its first argument.

    None when `node` is no in-place spelling (`x.add_(1)`, `x += 1`, `F.relu(x, inplace=True)`) of a
    listed operation.
    """
    target = node.target
    spelling = _SPELLINGS.get(target) if node.op in ("call_function", "call_method") else None
    if spelling is None:
        spelling = _SPELLINGS.get(_IN_PLACE.get(target, "")) or _without_underscore(target)
        values = _bind(spelling, node, writes=False) if spelling is not None else None
    else:
        values = _bind(spelling, node, writes=True)
    return (spelling.op, values) if spelling is not None and values is not None else None


def _without_underscore(target: Target) -> _Spelling | None:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if not name.endswith("_") or name.endswith("__"):
        return None
    return _SPELLINGS.get(name[:-1])  # a method's parameters are those of torch's function


_IN_PLACE: dict[Target, Target] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
}


def _bind(spelling: _Spelling, node: Node, *, writes: bool) -> dict[str, Any] | None:
    """Arguments of a call that does, or does not, say that it writes in place."""
    args = _join_sizes(spelling.signature, node.args) if isinstance(node.target, str) else node.args
    try:
        bound = spelling.signature.bind(*args, **node.kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    values = dict(bound.arguments)
    values.pop("_stacklevel", None)
    if values.pop("inplace", False) is not writes or values.pop("out", None) is not None:
        return None
    if isinstance(values.get("shape"), torch.dtype):  # Tensor.view(dtype) reads the bits anew
        return None
    return _tensor_first(spelling.op, values)


def is_canonical(node: Node) -> bool:
    """Whether `node` is a listed operation called through its canonical function and arguments."""
    op = op_of(node)
    if op is None or node.target is not op.target:
        return False
    values = arguments(node)
    return values is not None and op.build(values) == (node.args, node.kwargs)


def _spelling(node: Node) -> _Spelling | None:
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target is operator.sub and node.args and not isinstance(node.args[0], Node):
        return _SPELLINGS[torch.rsub]
    return _SPELLINGS.get(node.target)


def _tensor_first(op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
    """Operators take a number on their left, functions do not: swap where that says the same."""
    if set(values) != {"input", "other", *op.parameters} or isinstance(values["input"], Node):
        return values
    if op.name in ("add", "mul", "rsub", "maximum", "minimum", "eq", "ne"):
        return values | {"input": values["other"], "other": values["input"]}
    return None


def _is_default(parameter: inspect.Parameter, value: Any) -> bool:
    default = parameter.default
    if default is parameter.empty or isinstance(value, Node):
        return False
    return type(value) is type(default) and value == default


def _join_sizes(signature: inspect.Signature, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The method `x.view(2, 3)` means `torch.reshape(x, (2, 3))`."""
    for position, name in enumerate(signature.parameters):
        if name in _SIZES and len(args) > position:
            if isinstance(args[position], list | tuple | torch.dtype):
                return args
            return (*args[:position], tuple(args[position:]))
    return args


_SIZES = ("shape", "dims", "size")


@cache
def _signature(text: str) -> inspect.Signature:
    # Written as a parameter list so that the table below reads like the documentation it follows.
    function: Callable[..., Any] = eval(f"lambda {text}: None")
    return inspect.signature(function)


def _register(
    name: str,
    kind: Kind,
    target: Callable[..., Any],
    parameters: str,
    *spellings: Target,
    inplace: Iterable[Target] = (),
) -> None:
    """`inplace`: spellings that take `inplace=False` after the canonical positional parameters."""
    op = Op(name, target, kind, _signature(parameters))
    OPS[name] = op
    for spelling in (target, *spellings):
        _SPELLINGS[spelling] = _Spelling(op, op.signature)
    with_flag = _with_inplace(parameters)
    for spelling in inplace:
        _SPELLINGS[spelling] = _Spelling(op, _signature(with_flag))


def _with_inplace(parameters: str) -> str:
    # A trailing positional, as torch.nn.functional has it.
    return f"{parameters}, inplace=False" if "*" not in parameters else parameters


def _unary(names: str, kind: Kind = "pointwise") -> None:
    for name in names.split():
        functions: list[Target] = [name]
        special = getattr(torch.special, name, None)
        functional = getattr(F, name, None)
        functions += [f for f in (special, functional) if f is not None and f is not torch.relu]
        _register(name, kind, getattr(torch, name), "input", *functions)


_unary(
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor log log10 log1p log2 reciprocal"
    " rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc logical_not isnan isinf isfinite"
)
_register("relu", "pointwise", torch.relu, "input", "relu", inplace=[F.relu])
_register("neg", "pointwise", torch.neg, "input", "neg", "negative", operator.neg, torch.negative)
for _name, _parameters in {
    "relu6": "input",
    "hardswish": "input",
    "hardsigmoid": "input",
    "mish": "input",
    "silu": "input",
    "selu": "input",
    "elu": "input, alpha=1.0",
    "celu": "input, alpha=1.0",
    "leaky_relu": "input, negative_slope=0.01",
    "hardtanh": "input, min_val=-1.0, max_val=1.0",
    "threshold": "input, threshold, value",
}.items():
    _register(_name, "pointwise", getattr(F, _name), _parameters, inplace=[getattr(F, _name)])
for _name, _parameters in {
    "gelu": "input, *, approximate='none'",
    "softplus": "input, beta=1, threshold=20",
    "softsign": "input",
    "tanhshrink": "input",
    "logsigmoid": "input",
    "softshrink": "input, lambd=0.5",
    "hardshrink": "input, lambd=0.5",
}.items():
    _register(_name, "pointwise", getattr(F, _name), _parameters)
_register("round", "pointwise", torch.round, "input, *, decimals=0", "round")
_register(
    "clamp", "pointwise", torch.clamp, "input, min=None, max=None", "clamp", torch.clip, "clip"
)
_register("clamp_min", "pointwise", torch.clamp_min, "input, min", "clamp_min")
_register("clamp_max", "pointwise", torch.clamp_max, "input, max", "clamp_max")
_register(
    "nan_to_num",
    "pointwise",
    torch.nan_to_num,
    "input, nan=None, posinf=None, neginf=None",
    "nan_to_num",
)
_register("logit", "pointwise", torch.logit, "input, eps=None", "logit")
_register("add", "pointwise", torch.add, "input, other, *, alpha=1", "add", operator.add)
_register(
    "sub", "pointwise", torch.sub, "input, other, *, alpha=1", "sub", operator.sub, torch.subtract
)
_register("rsub", "pointwise", torch.rsub, "input, other, *, alpha=1")
_register("mul", "pointwise", torch.mul, "input, other", "mul", operator.mul, torch.multiply)
_register(
    "div",
    "pointwise",
    torch.div,
    "input, other, *, rounding_mode=None",
    "div",
    operator.truediv,
    torch.divide,
)
_LOGICAL = ("logical_and", "logical_or", "logical_xor")
_register("pow", "pointwise", torch.pow, "input, exponent", "pow", operator.pow)
for _name in ("maximum", "minimum", "atan2", "fmod", "remainder", *_LOGICAL):
    _register(_name, "pointwise", getattr(torch, _name), "input, other", _name)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _register(
        _name, "pointwise", getattr(torch, _name), "input, other", _name, getattr(operator, _name)
    )
_register("where", "pointwise", torch.where, "condition, input, other")
_register("masked_fill", "pointwise", torch.masked_fill, "input, mask, value", "masked_fill")
_register("lerp", "pointwise", torch.lerp, "input, end, weight", "lerp")
_register("addcmul", "pointwise", torch.addcmul, "input, tensor1, tensor2, *, value=1", "addcmul")

_register(
    "split",
    "view",
    torch.split,
    "tensor, split_size_or_sections, dim=0",
    "split",
    "split_with_sizes",
    torch.split_with_sizes,
    torch.functional.split,
)
_register("chunk", "view", torch.chunk, "input, chunks, dim=0", "chunk")
_register(
    "tensor_split", "view", torch.tensor_split, "input, indices_or_sections, dim=0", "tensor_split"
)
_register("unbind", "view", torch.unbind, "input, dim=0", "unbind")
_register("narrow", "view", torch.narrow, "input, dim, start, length", "narrow")
_register("select", "view", torch.select, "input, dim, index", "select")
_register("getitem", "view", operator.getitem, "input, index", "__getitem__")
_register("reshape", "view", torch.reshape, "input, shape", "reshape", "view")
_register("expand", "view", torch.Tensor.expand, "input, size", "expand")
_register("flatten", "view", torch.flatten, "input, start_dim=0, end_dim=-1", "flatten")
_register("unflatten", "view", torch.unflatten, "input, dim, sizes", "unflatten")
_register("squeeze", "view", torch.squeeze, "input, dim=None", "squeeze")
_register("unsqueeze", "view", torch.unsqueeze, "input, dim", "unsqueeze")
_register(
    "transpose",
    "view",
    torch.transpose,
    "input, dim0, dim1",
    "transpose",
    torch.swapaxes,
    "swapaxes",
)
_register("t", "view", torch.t, "input", "t")
_register("permute", "view", torch.permute, "input, dims", "permute")
_register("movedim", "view", torch.movedim, "input, source, destination", "movedim")
_register("detach", "view", torch.detach, "input", "detach")
_register("getattr", "other", getattr, "input, name")

_register("cat", "join", torch.cat, "tensors, dim=0", torch.concat, torch.concatenate)
_register("stack", "join", torch.stack, "tensors, dim=0")
_register("hstack", "join", torch.hstack, "tensors")
_register("vstack", "join", torch.vstack, "tensors", torch.row_stack)

_register("linear", "gemm", F.linear, "input, weight, bias=None")
_register("matmul", "gemm", torch.matmul, "input, other", "matmul", operator.matmul)
_register("mm", "gemm", torch.mm, "input, mat2", "mm")
_register("bmm", "gemm", torch.bmm, "input, mat2", "bmm")
_register("addmm", "gemm", torch.addmm, "input, mat1, mat2, *, beta=1, alpha=1", "addmm")
_register("baddbmm", "gemm", torch.baddbmm, "input, batch1, batch2, *, beta=1, alpha=1", "baddbmm")
_register("einsum", "gemm", torch.einsum, "equation, *operands", torch.functional.einsum)

_register(
    "layer_norm",
    "norm",
    F.layer_norm,
    "input, normalized_shape, weight=None, bias=None, eps=1e-05",
)
_register("rms_norm", "norm", torch.rms_norm, "input, normalized_shape, weight=None, eps=None")
_SPELLINGS[F.rms_norm] = _SPELLINGS[torch.rms_norm]
_register(
    "batch_norm",
    "norm",
    F.batch_norm,
    "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1,"
    " eps=1e-05",
)
_register("normalize", "norm", F.normalize, "input, p=2.0, dim=1, eps=1e-12, out=None")
for _name in ("softmax", "log_softmax"):
    _register(_name, "reduction", getattr(F, _name), "input, dim=None, dtype=None")
    for _target in (_name, getattr(torch, _name)):
        _SPELLINGS[_target] = _SPELLINGS[getattr(F, _name)]
    _SPELLINGS[getattr(F, _name)] = _Spelling(
        OPS[_name], _signature("input, dim=None, _stacklevel=3, dtype=None")
    )
for _name in ("sum", "mean"):
    _register(
        _name,
        "reduction",
        getattr(torch, _name),
        "input, dim=None, keepdim=False, *, dtype=None",
        _name,
    )
for _name in ("amax", "amin"):
    _register(_name, "reduction", getattr(torch, _name), "input, dim=(), keepdim=False", _name)
_register("dropout", "random", F.dropout, "input, p=0.5, training=True", inplace=[F.dropout])
_register(
    "embedding",
    "other",
    F.embedding,
    "input, weight, padding_idx=None, max_norm=None,"
    " norm_type=2.0, scale_grad_by_freq=False, sparse=False",
)
