"""Run a narrow MLP as one kernel.

Before: `linear(relu(linear(relu(linear(x, w1, b1)), w2, b2)), w3, b3)`
After:  `fused_mlp(x[None], [w1[None], ...], [b1[None], ...])[0]`

Two to four layers of widths to 512 with one activation between them, such as DLRM's bottom MLP;
the activation behind the last layer comes along. Gains: one kernel forward, three backward; in
inference hidden layers stay on the chip, in training they are written once for backward. Costs:
measuring takes some seconds once for each network and size. Needs: that the kernel is measured to
be faster (knob `gate`: measure, always, never).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from kernels.activations import ACTIVATIONS
from kernels.fused_mlp import fused_mlp
from kernels.fused_mlp.sizes import fits
from optimus.editor import Editor
from optimus.kernel_gate import Form, verdict
from optimus.legality import tensor_of, value_of
from optimus.merging import has_plain_parameters
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import requires_grad


@dataclass(frozen=True)
class FuseNarrowMlp(Pattern):
    """See the module's text."""

    gate: str = "measure"

    anchors = ("linear",)
    family = "kernels"

    def match(self, node: Node) -> Match | Miss:
        if not _is_layer(node):
            return Miss("not a linear on a matrix")
        last, behind = _activation_behind(node)
        layers, between = _layers_to(node)
        if last is not None and _linear_behind(last) and _fits([*layers[-3:], *last.users]):
            return Miss("not the last layer")
        if len(layers) < 2:
            return Miss("no second layer of widths that fit in front, used once")
        name = _activation(between[0])
        last = last if behind == name else None
        calls = [arguments(layer) or {} for layer in layers]
        inputs = [calls[0]["input"], *(c["weight"] for c in calls)]
        inputs += [c["bias"] for c in calls if c["bias"] is not None]
        slower = verdict(self.gate, _forms, (len(layers), name, last is not None), inputs)
        if slower is not None:
            return slower
        values = {"inputs": inputs, "layers": len(layers), "name": name, "last": last}
        nodes = [node, *layers[:-1], *between, *([] if last is None else [last])]
        return Match(tuple(nodes), values=values)

    def rewrite(self, match: Match, edit: Editor) -> None:
        towers = [edit.call("unsqueeze", tensor, 0) for tensor in match["inputs"]]
        num, last = match["layers"], match["last"]
        weights, biases = towers[1 : num + 1], towers[num + 1 :]
        target = torch.ops.kernels.fused_mlp.default
        old = last or match.anchor
        how = (match["name"], last is not None, requires_grad(value_of(old)))
        results = edit.call(target, towers[0], weights, biases, *how)
        (out,) = edit.items(results, [0])
        edit.replace(old, edit.call("squeeze", out, 0))

    def ungated(self) -> FuseNarrowMlp:
        return replace(self, gate="always")

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 5)
        relu, silu = torch.nn.ReLU, torch.nn.SiLU
        return (
            Example("activated", lambda: (_mlp(relu, 5, 4, 6, last=True), (x,)), fires=1),
            Example("tower", lambda: (_mlp(silu, 5, 4, 6, 3, 1), (x,)), fires=1),
            Example("five layers", lambda: (_mlp(relu, 5, 4, 4, 4, 4, 1), (x,)), fires=1),
            Example("wide", lambda: (_mlp(relu, 5, 600, 3), (x,)), fires=0),
            Example("single", lambda: (_mlp(relu, 5, 3, last=True), (x,)), fires=0),
        )


def _activation(node: Node) -> str:
    """The name in kernels.activations of what `node` applies, "none" for anything else."""
    op = op_of(node)
    if op is None:
        return "none"
    if op.name == "gelu":
        approximate = (arguments(node) or {}).get("approximate")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(approximate), "none")
    return op.name if op.name in ACTIVATIONS and arguments(node) is not None else "none"


def _activation_behind(linear: Node) -> tuple[Node | None, str]:
    """The activation that alone uses `linear`."""
    users = list(linear.users)
    name = _activation(users[0]) if len(users) == 1 else "none"
    return (users[0], name) if name != "none" else (None, "none")


def _linear_behind(activation: Node) -> bool:
    users = list(activation.users)
    return len(users) == 1 and _is_layer(users[0]) and _input(users[0]) is activation


def _input(node: Node) -> Node | None:
    """What a call works on."""
    value = (arguments(node) or {}).get("input")
    return value if isinstance(value, Node) else None


def _is_layer(node: Node) -> bool:
    """Whether it is a linear on a matrix."""
    op, values = op_of(node), arguments(node)
    if op is None or op.name != "linear" or values is None or not has_plain_parameters(node):
        return False
    tensors = [tensor_of(values[name]) for name in ("input", "weight")]
    return all(t is not None and t.dim() == 2 for t in tensors)


def _layers_to(node: Node) -> tuple[list[Node], list[Node]]:
    """The longest chain of layers that ends in `node` and fits a kernel, first layer first; and
    the activations between them, all of one kind."""
    layers, between = [node], list[Node]()
    while True:
        activation = _input(layers[0])
        source = None if activation is None else _input(activation)
        if activation is None or source is None or not _is_layer(source):
            return layers, between
        name = _activation(activation)
        alone = len(activation.users) == len(source.users) == 1
        same = name != "none" and all(_activation(other) == name for other in between)
        if not alone or not same or not _fits([source, *layers]):
            return layers, between
        layers, between = [source, *layers], [activation, *between]


def _fits(layers: Sequence[Node]) -> bool:
    calls = [arguments(layer) or {} for layer in layers]
    if len({c["bias"] is None for c in calls}) > 1:
        return False
    weights = [tensor_of(c["weight"]) for c in calls]
    sizes = [w.shape[1] for w in weights if w is not None][:1]
    sizes += [w.shape[0] for w in weights if w is not None]
    out = tensor_of(layers[-1])
    if out is None or not all(isinstance(size, int) for size in sizes):
        return False
    return fits(sizes, out.element_size())


def _forms(layers: int, name: str, last: bool) -> tuple[Form, Form]:
    def ours(*tensors: Tensor) -> Tensor:
        x, weights, biases = tensors[0], tensors[1 : layers + 1], tensors[layers + 1 :]
        return fused_mlp(x, weights, biases, activation=name, activate_last=last)

    def plain(*tensors: Tensor) -> Tensor:
        x, weights, biases = tensors[0], tensors[1 : layers + 1], tensors[layers + 1 :]
        for i, weight in enumerate(weights):
            x = F.linear(x, weight, biases[i] if biases else None)
            x = ACTIVATIONS[name](x) if last or i + 1 < layers else x
        return x

    return ours, plain


def _mlp(activation: Any, *sizes: int, last: bool = False) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [torch.nn.Linear(a, b), activation()]
    return torch.nn.Sequential(*(layers if last else layers[:-1]))
