"""What benchmarks.kernels times: shapes of the models, in plain PyTorch and by our kernels.

A case gives the same function in several forms. `bytes` and `flops` are what forward cannot do
without: inputs read once, results written once, products taken once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batched_norm import batched_norm
from kernels.cross_layer import low_rank_cross_layer
from kernels.dot_interaction import dot_interaction
from kernels.fused_mlp import fused_mlp
from kernels.gated_linear import gated_linear
from kernels.grouped_linear import grouped_linear
from kernels.linear_act import linear_act

Form = Callable[..., Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """`shapes(rows)`: of the inputs, x first. `forms`: by provider; "eager" is the definition, and
    what torch.compile's modes are given. `flops`, `out`: of forward, elements written."""

    name: str
    rows: Sequence[int]
    shapes: Callable[[int], Sequence[Shape]]
    forms: Mapping[str, Form]
    flops: Callable[[int], float]
    out: Callable[[int], float]
    wants_x: bool = True

    def inputs(self, rows: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Random tensors that require gradients; weights of variance 1 / inputs."""
        generator = torch.Generator().manual_seed(0)
        tensors = []
        for i, shape in enumerate(self.shapes(rows)):
            tensor = torch.randn(shape, generator=generator)
            if i and len(shape) > 1 and shape[0] != rows:
                tensor /= shape[-1] ** 0.5
            leaf = tensor.to(device, dtype).requires_grad_(bool(i) or self.wants_x)
            tensors.append(leaf)
        return tensors

    def bytes(self, rows: int, itemsize: int) -> float:
        """Least traffic of a forward pass."""
        read = sum(torch.Size(shape).numel() for shape in self.shapes(rows))
        return (read + self.out(rows)) * itemsize


ROWS = (2048, 8192, 32768, 65536)


def _mlp(*sizes: int, last: bool, wants_x: bool = True) -> Case:
    layers = list(pairwise(sizes))
    num = len(layers)

    def eager(x: Tensor, *parameters: Tensor) -> Tensor:
        for i in range(num):
            x = F.linear(x, parameters[i], parameters[num + i])
            x = torch.relu(x) if last or i + 1 < num else x
        return x

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return fused_mlp(x, parameters[:num], parameters[num:], activate_last=last)

    def shapes(rows: int) -> list[Shape]:
        weights: list[Shape] = [(b, a) for a, b in layers]
        return [(rows, sizes[0]), *weights, *[(size,) for size in sizes[1:]]]

    return Case(
        f"mlp {'-'.join(map(str, sizes))}",
        ROWS,
        shapes,
        {"eager": eager, "ours": ours},
        lambda rows: 2.0 * rows * sum(a * b for a, b in layers),
        lambda rows: rows * sizes[-1],
        wants_x,
    )


def _towers(count: int, *sizes: int) -> Case:
    layers = list(pairwise(sizes))
    num = len(layers)

    def eager(x: Tensor, *parameters: Tensor) -> Tensor:
        outs = []
        for t in range(count):
            h = x[t]
            for i in range(num):
                h = F.linear(h, parameters[i][t], parameters[num + i][t])
                h = torch.relu(h) if i + 1 < num else h
            outs.append(h)
        return torch.stack(outs)

    def bmm(x: Tensor, *parameters: Tensor) -> Tensor:
        for i in range(num):
            x = torch.baddbmm(parameters[num + i].unsqueeze(1), x, parameters[i].mT)
            x = torch.relu(x) if i + 1 < num else x
        return x

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return fused_mlp(x, parameters[:num], parameters[num:])

    def shapes(rows: int) -> list[Shape]:
        weights: list[Shape] = [(count, b, a) for a, b in layers]
        return [(count, rows, sizes[0]), *weights, *[(count, size) for size in sizes[1:]]]

    return Case(
        f"{count} towers {'-'.join(map(str, sizes))}",
        (2048, 8192),
        shapes,
        {"eager": eager, "bmm": bmm, "ours": ours},
        lambda rows: 2.0 * count * rows * sum(a * b for a, b in layers),
        lambda rows: count * rows * sizes[-1],
    )


def _interaction(features: int, size: int) -> Case:
    vectors = features + 1
    pairs = vectors * features // 2

    @cache
    def index(device: torch.device) -> Tensor:
        return torch.triu_indices(vectors, vectors, 1, device=device)

    def eager(dense: Tensor, embedded: Tensor) -> Tensor:
        both = torch.cat((dense.unsqueeze(1), embedded), 1)
        products = torch.bmm(both, both.transpose(1, 2))
        rows_of, columns_of = index(dense.device)
        return torch.cat((dense, products[:, rows_of, columns_of]), 1)

    return Case(
        f"dot_interaction {features}x{size}",
        ROWS,
        lambda rows: [(rows, size), (rows, features, size)],
        {"eager": eager, "ours": partial(dot_interaction, upper=True)},
        lambda rows: 2.0 * rows * vectors**2 * size,
        lambda rows: rows * (size + pairs),
    )


def _cross(size: int, rank: int) -> Case:
    def eager(x0: Tensor, x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        return x0 * F.linear(F.linear(x, down), up, bias) + x

    return Case(
        f"cross_layer {size} rank {rank}",
        ROWS,
        lambda rows: [(rows, size), (rows, size), (rank, size), (size, rank), (size,)],
        {"eager": eager, "ours": low_rank_cross_layer},
        lambda rows: 4.0 * rows * size * rank,
        lambda rows: rows * size,
    )


def _norm(count: int, width: int, activation: str) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = [
            F.layer_norm(part, (width,), weight[i], bias[i]) for i, part in enumerate(x.unbind(1))
        ]
        return torch.stack([F.relu(p) if activation == "relu" else p for p in parts], 1)

    def batched(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = F.layer_norm(x, (width,)) * weight + bias
        return F.relu(out) if activation == "relu" else out

    return Case(
        f"batched_norm {count}x{width} {activation}",
        ROWS[:3],
        lambda rows: [(rows, count, width), (count, width), (count, width)],
        {
            "eager": eager,
            "one_norm": batched,
            "ours": partial(batched_norm, activation=activation),
        },
        lambda rows: 8.0 * rows * count * width,
        lambda rows: rows * count * width,
    )


def _grouped(name: str, shapes: Sequence[tuple[int, int]]) -> Case:
    """Linears on adjoining slices; (inputs, outputs) of each."""
    num, ins = len(shapes), [k for k, _ in shapes]

    def eager(x: Tensor, *parameters: Tensor) -> Tensor:
        parts = x.split(ins, 1)
        outs = [F.linear(p, parameters[g], parameters[num + g]) for g, p in enumerate(parts)]
        return torch.cat(outs, 1)

    def bmm(x: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = torch.stack(parameters[:num]), torch.stack(parameters[num:])
        pieces = x.unflatten(1, (num, ins[0])).transpose(0, 1)
        out = torch.baddbmm(biases.unsqueeze(1), pieces, weights.mT)
        return out.transpose(0, 1).flatten(1)

    def grouped_mm(x: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = torch.stack(parameters[:num]), torch.stack(parameters[num:])
        pieces = x.unflatten(1, (num, ins[0])).transpose(0, 1).contiguous()
        out = torch._grouped_mm(pieces, weights.mT) + biases.unsqueeze(1)
        return out.transpose(0, 1).flatten(1)

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return grouped_linear(x, parameters[:num], parameters[num:])

    forms: dict[str, Form] = {"eager": eager, "ours": ours}
    if len(set(shapes)) == 1:
        forms |= {"bmm": bmm, "grouped_mm": grouped_mm}

    def inputs(rows: int) -> list[Shape]:
        weights: list[Shape] = [(n, k) for k, n in shapes]
        return [(rows, sum(ins)), *weights, *[(n,) for _, n in shapes]]

    return Case(
        f"grouped {name}",
        (2048, 8192),
        inputs,
        forms,
        lambda rows: 2.0 * rows * sum(k * n for k, n in shapes),
        lambda rows: rows * sum(n for _, n in shapes),
    )


def _linear(size_in: int, size_out: int) -> Case:
    """A wide layer with ReLU."""
    return Case(
        f"linear_relu {size_in}-{size_out}",
        ROWS,
        lambda rows: [(rows, size_in), (size_out, size_in), (size_out,)],
        {"eager": lambda x, w, b: torch.relu(F.linear(x, w, b)), "ours": linear_act},
        lambda rows: 2.0 * rows * size_in * size_out,
        lambda rows: rows * size_out,
    )


def _geglu(batch: int, tokens: int, size: int, hidden: int) -> Case:
    """An MLP with a gate; rows are batch x tokens."""

    def eager(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up), down)

    def ours(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(gated_linear(x, gate, up, activation="gelu_tanh"), down)

    def liger(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        return F.linear(LigerGELUMulFunction.apply(F.linear(x, gate), F.linear(x, up)), down)

    return Case(
        f"geglu {batch}x{tokens}x{size} hidden {hidden}",
        (batch * tokens,),
        lambda rows: [
            (max(1, rows // tokens), min(rows, tokens), size),
            *[(hidden, size), (hidden, size), (size, hidden)],
        ],
        {"eager": eager, "ours": ours, "liger": liger},
        lambda rows: 6.0 * rows * size * hidden,
        lambda rows: rows * size,
    )


CASES = {
    case.name: case
    for case in (
        _geglu(64, 128, 768, 3072),
        _mlp(13, 512, 256, 128, last=True, wants_x=False),
        _mlp(256, 128, 64, 1, last=False),
        _towers(10, 256, 128, 1),
        _interaction(26, 128),
        _cross(3456, 512),
        _grouped("64 x 64-32", [(64, 32)] * 64),
        _grouped("16 x 768-3072", [(768, 3072)] * 16),
        _grouped("26 unequal", [(8 * (g + 1), 16 * (1 + g % 4)) for g in range(26)]),
        _linear(479, 1024),
        _linear(1024, 1024),
        _norm(64, 32, "relu"),
        _norm(39, 10, "none"),
        _norm(16, 768, "none"),
    )
}
