"""The vocabulary of Torch IR: which functions, methods and operators spell one operation.

Dynamo records a program as its author wrote it: `torch.relu(x)`, `F.relu(x)`, `x.relu()`. Here each
operation has one entry: its canonical function, its parameters with their defaults, and its other
spellings. `optimus.ops` reads calls by this table.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

Kind = Literal["pointwise", "view", "join", "reduction", "norm", "gemm", "random", "other"]
Target = Callable[..., Any] | str
"""What a node calls: a function, or the name of a tensor method."""


class Parameter(NamedTuple):
    """What `inspect.Parameter` says, in plain fields: a call's arguments are read very often."""

    name: str
    positional: bool
    takes_rest: bool
    default: Any


def slots_of(signature: inspect.Signature) -> tuple[Parameter, ...]:
    """The parameters of `signature`, in order."""
    return tuple(
        Parameter(p.name, p.kind is not p.KEYWORD_ONLY, p.kind is p.VAR_POSITIONAL, p.default)
        for p in signature.parameters.values()
    )


@dataclass(frozen=True)
class Op:
    """One operation: `target` is its canonical function, `signature` that function's parameters."""

    name: str
    target: Callable[..., Any]
    kind: Kind
    signature: inspect.Signature
    parameters: tuple[str, ...] = field(init=False)
    slots: tuple[Parameter, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.signature.parameters))
        object.__setattr__(self, "slots", slots_of(self.signature))

    def build(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Canonical `(args, kwargs)`: positional in signature order, trailing defaults left out."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        required = 0
        rest = False
        for name, positional, takes_rest, default in self.slots:
            value = values[name]
            if takes_rest:
                args.extend(value)
                rest = True
            elif not positional:
                if not _is_default(default, value):
                    kwargs[name] = value
            else:
                args.append(value)
                required = required if _is_default(default, value) else len(args)
        return tuple(args if rest else args[:required]), kwargs


def _is_default(default: Any, value: Any) -> bool:
    return type(value) is type(default) and value == default


@dataclass(frozen=True)
class Spelling:
    """One way to call `op`. `signature` names the parameters as `op` does where they mean the same;
    `read` turns the arguments bound to it into those of `op`, None where `op` cannot say that."""

    op: Op
    signature: inspect.Signature
    read: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
    slots: tuple[Parameter, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", slots_of(self.signature))


OPS: dict[str, Op] = {}
SPELLINGS: dict[Target, Spelling] = {}


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
        SPELLINGS[spelling] = Spelling(op, op.signature)
    with_flag = _with_inplace(parameters)
    for spelling in inplace:
        SPELLINGS[spelling] = Spelling(op, _signature(with_flag))


def _with_inplace(parameters: str) -> str:
    # A trailing positional, as torch.nn.functional has it.
    return f"{parameters}, inplace=False" if "*" not in parameters else parameters


def _respell(
    name: str,
    parameters: str,
    *spellings: Target,
    read: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
    **said: Any,
) -> None:
    """Further spellings of `name` with other parameters; `said`: what these say by their name."""

    def fill(values: dict[str, Any]) -> dict[str, Any] | None:
        return read(values | said) if read is not None else values | said

    for spelling in spellings:
        SPELLINGS[spelling] = Spelling(OPS[name], _signature(parameters), fill)


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
    torch.swapdims,
    "swapdims",
)
_register("t", "view", torch.t, "input", "t")
_register("permute", "view", torch.permute, "input, dims", "permute")
_register(
    "movedim",
    "view",
    torch.movedim,
    "input, source, destination",
    "movedim",
    torch.moveaxis,
    "moveaxis",
)
_register("detach", "view", torch.detach, "input", "detach")
_register("getattr", "other", getattr, "input, name")
# No other spelling of flatten, which gives back its input, or a view, where this one does not.
_register("ravel", "view", torch.ravel, "input", "ravel")
_register(
    "contiguous",
    "view",
    torch.Tensor.contiguous,
    "input, *, memory_format=torch.contiguous_format",
    "contiguous",
)
_register(
    "clone", "pointwise", torch.clone, "input, *, memory_format=torch.preserve_format", "clone"
)
for _name in ("hsplit", "vsplit", "dsplit"):
    _register(_name, "view", getattr(torch, _name), "input, indices_or_sections", _name)


def _read_to(values: dict[str, Any]) -> dict[str, Any] | None:
    """`x.to(...)` takes a dtype, a device or both, by place or by name, then two flags."""
    flags = ["non_blocking", "copy"]
    for value in values.pop("target", ()):
        if isinstance(value, torch.dtype):
            values["dtype"] = value
        elif isinstance(value, str | torch.device):
            values["device"] = value
        elif isinstance(value, bool) and flags:
            values[flags.pop(0)] = value
        else:  # another tensor
            return None
    return values if values["dtype"] is not None or values["device"] is not None else None


_TO = "device=None, dtype=None, non_blocking=False, copy=False, memory_format=torch.preserve_format"
_register("to", "pointwise", torch.Tensor.to, f"input, *, {_TO}")
_respell("to", f"input, *target, {_TO}", torch.Tensor.to, "to", read=_read_to)
for _name, _dtype in {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
}.items():
    _respell(
        "to",
        "input, *, memory_format=torch.preserve_format",
        _name,
        dtype=_dtype,
        device=None,
        non_blocking=False,
        copy=False,
    )

_register("cat", "join", torch.cat, "tensors, dim=0", torch.concat, torch.concatenate)
_register("stack", "join", torch.stack, "tensors, dim=0")
_register("hstack", "join", torch.hstack, "tensors")
_register("vstack", "join", torch.vstack, "tensors", torch.row_stack)
_register("dstack", "join", torch.dstack, "tensors")
_register("column_stack", "join", torch.column_stack, "tensors")

_register("linear", "gemm", F.linear, "input, weight, bias=None")
_register("matmul", "gemm", torch.matmul, "input, other", "matmul", operator.matmul)
_register("mm", "gemm", torch.mm, "input, mat2", "mm")
_register("bmm", "gemm", torch.bmm, "input, mat2", "bmm")
for _name, _parameters in {
    "addmm": "input, mat1, mat2, *, beta=1, alpha=1",
    "baddbmm": "input, batch1, batch2, *, beta=1, alpha=1",
}.items():
    _register(_name, "gemm", getattr(torch, _name), _parameters, _name)
for _name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"):
    _packet = getattr(torch.ops.aten, _name)
    SPELLINGS[_packet] = SPELLINGS[_packet.default] = SPELLINGS[OPS[_name].target]
_register("einsum", "gemm", torch.einsum, "equation, *operands", torch.functional.einsum)

_register(
    "layer_norm",
    "norm",
    F.layer_norm,
    "input, normalized_shape, weight=None, bias=None, eps=1e-05",
)
_register("rms_norm", "norm", torch.rms_norm, "input, normalized_shape, weight=None, eps=None")
SPELLINGS[F.rms_norm] = SPELLINGS[torch.rms_norm]
_register(
    "batch_norm",
    "norm",
    F.batch_norm,
    "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1,"
    " eps=1e-05",
)
_register("normalize", "norm", F.normalize, "input, p=2.0, dim=1, eps=1e-12")
for _name in ("softmax", "log_softmax"):
    _register(_name, "reduction", getattr(F, _name), "input, dim=None, *, dtype=None")
    _respell(_name, "input, dim, dtype=None", _name, getattr(torch, _name))
    _respell(_name, "input, dim=None, _stacklevel=3, dtype=None", getattr(F, _name))
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
SPELLINGS[torch.dropout] = Spelling(OPS["dropout"], _signature("input, p, training"))
for _name, _default in {
    "alpha_dropout": "False",
    "feature_alpha_dropout": "False",
    "dropout1d": "True",
    "dropout2d": "True",
    "dropout3d": "True",
}.items():
    _parameters = f"input, p=0.5, training={_default}"
    _register(_name, "random", getattr(F, _name), _parameters, inplace=[getattr(F, _name)])
_register(
    "embedding",
    "other",
    F.embedding,
    "input, weight, padding_idx=None, max_norm=None,"
    " norm_type=2.0, scale_grad_by_freq=False, sparse=False",
)
