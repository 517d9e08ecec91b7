"""Small dense parts of recommender models as people write them, to count GEMM launches on.

Each comes in the words of its `Words`: the same program spelled otherwise must do as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Words:
    """How a program takes tensors apart, applies linears and puts results together."""

    def parts(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """`x` cut along its last dimension."""
        return list(torch.split(x, list(widths), -1))

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """The layer's output."""
        out: Tensor = layer(x)
        return out

    def relu(self, x: Tensor) -> Tensor:
        """An activation."""
        return torch.relu(x)

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """(B, N, D) of N (B, D)."""
        return torch.stack(list(parts), 1)


class OtherWords(Words):
    """Slices for split, products for linear, methods for functions, a cat for stack."""

    def parts(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]
        return [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        out = x @ layer.weight.t()
        return out if layer.bias is None else out + layer.bias

    def relu(self, x: Tensor) -> Tensor:
        return x.clone().relu_()

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part[:, None] for part in parts], dim=-2)


class Model(nn.Module):
    """`inputs(batch)` makes example inputs."""

    def __init__(self, words: Words | None = None) -> None:
        super().__init__()
        self.words = words or Words()

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def run(self, layers: Sequence[nn.Linear], x: Tensor, last: bool = True) -> Tensor:
        """An MLP; `last`: with an activation behind its last layer."""
        for i, layer in enumerate(layers):
            x = self.words.linear(layer, x)
            x = self.words.relu(x) if last or i + 1 < len(layers) else x
        return x


def _mlp(*widths: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))


def _many(count: int, make: Callable[[], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


class Dlrm(Model):
    """Bottom MLP, pairwise dot products of 26 features, top MLP."""

    def __init__(self, words: Words | None = None, count: int = 26, width: int = 32) -> None:
        super().__init__(words)
        self.count, self.width, n = count, width, count + 1
        self.bottom = _mlp(13, 64, width)
        self.top = _mlp(width + n * (n - 1) // 2, 64, 32)
        self.out = nn.Linear(32, 1)
        self.register_buffer("pairs", torch.tril_indices(n, n, -1))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        embedded = torch.randn(batch, self.count * self.width, requires_grad=True)
        return torch.randn(batch, 13), embedded

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        x = self.run(self.bottom, dense)
        parts = self.words.parts(embedded, [self.width] * self.count)
        features = torch.cat([x, *parts], 1).view(x.shape[0], -1, self.width)
        dots = torch.bmm(features, features.transpose(1, 2))
        pairs = torch.cat([x, dots[:, self.pairs[0], self.pairs[1]]], 1)
        return self.words.linear(self.out, self.run(self.top, pairs))


class Dcnv2(Model):
    """Low-rank cross layers with a mixture of experts."""

    def __init__(self, words: Words | None = None, experts: int = 4, layers: int = 3) -> None:
        super().__init__(words)
        self.num_layers, self.num_experts = layers, experts

        def each(make: Callable[[], nn.Module]) -> nn.ModuleList:
            return _many(layers, lambda: _many(experts, make))

        self.down = each(lambda: nn.Linear(128, 16, bias=False))
        self.core = each(lambda: nn.Linear(16, 16, bias=False))
        self.up = each(lambda: nn.Linear(16, 128))
        self.gates = each(lambda: nn.Linear(128, 1, bias=False))
        self.out = nn.Linear(128, 1)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, 128, requires_grad=True),)

    def forward(self, first: Tensor) -> Tensor:
        x, linear = first, self.words.linear
        for down, core, up, gates in zip(self.down, self.core, self.up, self.gates, strict=True):
            outs, scores = [], []
            for e in range(self.num_experts):
                v = torch.tanh(linear(down[e], x))
                v = torch.tanh(linear(core[e], v))
                outs.append(first * linear(up[e], v))
                scores.append(linear(gates[e], x))
            gate = torch.stack(scores, 1).softmax(1)
            x = torch.matmul(torch.stack(outs, 2), gate).squeeze(2) + x
        return linear(self.out, x)


class Mmoe(Model):
    """Experts and gates on one input, a tower for each task."""

    def __init__(self, words: Words | None = None, experts: int = 8, tasks: int = 4) -> None:
        super().__init__(words)
        self.experts = _many(experts, lambda: _mlp(128, 64, 64))
        self.gates = _many(tasks, lambda: nn.Linear(128, experts))
        self.towers = _many(tasks, lambda: _mlp(64, 32, 1))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, 128, requires_grad=True),)

    def forward(self, x: Tensor) -> Tensor:
        experts = self.words.side_by_side([self.run(expert, x) for expert in self.experts])
        outs: list[Tensor] = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = self.words.linear(gate, x).softmax(-1).unsqueeze(-1)
            outs.append(self.run(tower, (weights * experts).sum(1), last=False))
        return torch.cat(outs, 1)


class Ple(Model):
    """Shared experts and experts of each task, with gates over both."""

    def __init__(self, words: Words | None = None, tasks: int = 3, experts: int = 4) -> None:
        super().__init__(words)
        self.shared = _many(experts, lambda: _mlp(64, 32))
        self.own = _many(tasks, lambda: _many(experts, lambda: _mlp(64, 32)))
        self.gates = _many(tasks, lambda: nn.Linear(64, 2 * experts))
        self.towers = nn.ModuleList(_mlp(32, 16, 1 + i) for i in range(tasks))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, 64, requires_grad=True),)

    def forward(self, x: Tensor) -> Tensor:
        shared = [self.run(expert, x) for expert in self.shared]
        outs: list[Tensor] = []
        for own, gate, tower in zip(self.own, self.gates, self.towers, strict=True):
            experts = self.words.side_by_side(shared + [self.run(expert, x) for expert in own])
            weights = self.words.linear(gate, x).softmax(-1).unsqueeze(-1)
            outs.append(self.run(tower, (weights * experts).sum(1), last=False))
        return torch.cat(outs, 1)


class Towers(Model):
    """A linear, a LayerNorm and a tanh for each feature, of unequal widths if given."""

    def __init__(self, words: Words | None = None, widths: Sequence[int] = (32,) * 40) -> None:
        super().__init__(words)
        self.widths = tuple(widths)
        self.linears = nn.ModuleList(nn.Linear(width, 32) for width in widths)
        self.norms = _many(len(widths), lambda: nn.LayerNorm(32))
        self.out = nn.Linear(32 * len(widths), 1)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, sum(self.widths), requires_grad=True),)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.words.parts(x, self.widths)
        branches = zip(parts, self.linears, self.norms, strict=True)
        outs = [torch.tanh(norm(self.words.linear(layer, p))) for p, layer, norm in branches]
        return self.words.linear(self.out, torch.cat(outs, 1))


class HetTowers(Towers):
    """Features from 8 to 128 wide."""

    def __init__(self, words: Words | None = None) -> None:
        super().__init__(words, [8, 16, 32, 64, 128] * 8)


class SliceTowers(Model):
    """Slices times parameters, without bias, and gelu."""

    def __init__(self, words: Words | None = None, count: int = 40, width: int = 32) -> None:
        super().__init__(words)
        self.width = width
        made = (nn.Parameter(torch.randn(width, width) * 0.1) for _ in range(count))
        self.weights = nn.ParameterList(made)
        self.norms = _many(count, lambda: nn.LayerNorm(width))
        self.out = nn.Linear(count * width, 1)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, len(self.weights) * self.width, requires_grad=True),)

    def forward(self, x: Tensor) -> Tensor:
        outs: list[Tensor] = []
        for i, (weight, norm) in enumerate(zip(self.weights, self.norms, strict=True)):
            part = x[:, i * self.width : (i + 1) * self.width]
            outs.append(F.gelu(norm(part @ weight)))
        return self.words.linear(self.out, torch.cat(outs, 1))


class ChunkGate(Model):
    """Each chunk times a gate of its own, normed; their sum."""

    def __init__(self, words: Words | None = None, count: int = 12, width: int = 32) -> None:
        super().__init__(words)
        self.count, self.width = count, width
        self.linears = _many(count, lambda: nn.Linear(width, width))
        self.norms = _many(count, lambda: nn.LayerNorm(width))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, self.count * self.width, requires_grad=True),)

    def forward(self, x: Tensor) -> Tensor:
        branches = zip(torch.chunk(x, self.count, 1), self.linears, self.norms, strict=True)
        outs = [n(t * torch.sigmoid(self.words.linear(gate, t))) for t, gate, n in branches]
        return self.words.side_by_side(outs).sum(1)


class Wukong(Model):
    """Factorization-machine and linear-compression blocks over a stack of embeddings."""

    def __init__(self, words: Words | None = None, count: int = 32, layers: int = 3) -> None:
        super().__init__(words)
        self.count, made = count, [nn.Parameter(torch.randn(count, 8) * 0.1) for _ in range(layers)]
        self.projections = nn.ParameterList(made)
        self.compress = _many(layers, lambda: nn.Linear(count, 16, bias=False))
        self.residual = _many(layers, lambda: nn.Linear(count, 32, bias=False))
        self.inner_norms = _many(layers, lambda: nn.LayerNorm(count * 8))
        self.mlps = _many(layers, lambda: _mlp(count * 8, 64, 512))
        self.norms = _many(layers, lambda: nn.LayerNorm(32))
        self.out = nn.Linear(32 * 32, 1)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(batch, 32, requires_grad=True) for _ in range(self.count))

    def forward(self, *embedded: Tensor) -> Tensor:
        x, linear = self.words.side_by_side(embedded), self.words.linear
        for i, projection in enumerate(self.projections):
            dots = torch.bmm(x, torch.matmul(x.transpose(1, 2), projection)).flatten(1)
            mixed = self.run(self.mlps[i], self.inner_norms[i](dots), last=False).view(-1, 16, 32)
            compressed = linear(self.compress[i], x.transpose(1, 2)).transpose(1, 2)
            residual = linear(self.residual[i], x.transpose(1, 2)).transpose(1, 2)
            x = self.norms[i](torch.cat([mixed, compressed], 1) + residual)
        return linear(self.out, x.flatten(1))


class Dhen(Model):
    """In each layer dot products, a linear over features and one for each, side by side."""

    def __init__(self, words: Words | None = None, count: int = 16, layers: int = 2) -> None:
        super().__init__(words)
        self.count = count
        self.across = _many(layers, lambda: nn.Linear(count, count // 2))
        self.dots = _many(layers, lambda: nn.Linear(count * count, count // 2 * 32))
        self.each = _many(layers, lambda: _many(count, lambda: nn.Linear(32, 32)))
        self.norms = _many(layers, lambda: nn.LayerNorm(32))
        self.out = nn.Linear(count * 32, 1)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, self.count * 32, requires_grad=True),)

    def forward(self, x: Tensor) -> Tensor:
        x, linear = x.view(-1, self.count, 32), self.words.linear
        for across, dots, each, norm in zip(
            self.across, self.dots, self.each, self.norms, strict=True
        ):
            a = linear(across, x.transpose(1, 2)).transpose(1, 2)
            b = linear(dots, torch.bmm(x, x.transpose(1, 2)).flatten(1)).view(-1, 8, 32)
            features = zip(each, torch.unbind(x, 1), strict=True)
            c = self.words.side_by_side([self.words.relu(linear(m, t)) for m, t in features])
            x = norm(torch.cat([a, b], 1) + c + x)
        return linear(self.out, x.flatten(1))


class Lce(Model):
    """Several linear compressions of one stack of embeddings, a linear for each."""

    def __init__(self, words: Words | None = None, count: int = 64, tasks: int = 6) -> None:
        super().__init__(words)
        self.count = count
        made = (nn.Parameter(torch.randn(8, count) * 0.1) for _ in range(tasks))
        self.weights = nn.ParameterList(made)
        self.towers = _many(tasks, lambda: nn.Linear(8 * 16, 16))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, self.count * 16, requires_grad=True),)

    def forward(self, x: Tensor) -> Tensor:
        stack = x.view(-1, self.count, 16)
        pairs = zip(self.weights, self.towers, strict=True)
        compressed = [self.words.linear(t, torch.matmul(w, stack).flatten(1)) for w, t in pairs]
        return torch.cat([torch.tanh(each) for each in compressed], 1)
