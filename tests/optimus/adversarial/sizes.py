"""Graphs whose sizes, places or numbers change from call to call."""

# ruff: noqa: B905 (of unequal lengths on purpose)

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()
DYNAMIC = "symbolic dynamic"


def _linears(count, *sizes):
    return nn.ModuleList(nn.Linear(*sizes) for _ in range(count))


@graphs((4, -6), modes=DYNAMIC)
def widths_that_change(m, x):
    a, b = x[:, :2], x[:, 2:]
    n = x.shape[1]
    return [
        torch.cat([a, b], 1), torch.cat(x.split(2, 1), 1), torch.cat(x.split([2, n - 2], 1), 1),
        torch.cat([b, a], 1), x.split(n - 1, 1)[0] + 1, x.narrow(1, n - 2, 2) * 2, x[:, -2:] * 3,
        torch.stack(x.unbind(1), 1), [p.relu() for p in x.split(3, 1)], x[:, n - 1], x[:, : n // 2],
        x.chunk(2, 1)[0] * 1, torch.cat([x, x], 1).split(n, 1)[1] + 0, x.tensor_split(2, 1)[1] + 1,
    ]  # fmt: skip


@graphs((4, -6), modes=DYNAMIC)
def rows_and_columns_change(m, x):
    b, n = x.shape
    return [
        x.view(-1).view(b, n).relu(), x.reshape(n, b).t(), x.flatten().unflatten(0, (b, n)),
        x.unsqueeze(1).expand(b, 2, n).reshape(b, 2 * n), x.t().contiguous().t(), x / n,
        x.sum() / b, [p.sum(0) for p in x.split(2, 1)], x.mean(1), torch.full((n,), b),
        x.new_zeros(b, n) + x, x.view(b, 1, n).squeeze(1).exp(), torch.arange(n) + x, x @ x.t(),
        torch.cat([x, x.exp()]),
    ]  # fmt: skip


@graphs((4, 12), 2, modes="train symbolic")
def places_are_numbers_of_the_caller(m, x, n):
    return [
        x[:, :n] * 1, x[:, n:] * 1, x.split(n, 1)[0] + 1, torch.cat([x[:, :n], x[:, n:]], 1),
        x.narrow(1, n, 3) + 0, x.select(1, n) + 0, x[:, n] * 2, x.split([n, 12 - n], 1)[1] + 1,
        torch.stack([x[:, n], x[:, n + 1]]), x.roll(n, 1), x * n, x + n,
        [p * n for p in x.split(6, 1)], torch.add(x, x, alpha=n), x.clamp(-n, n), x**n,
        x.view(-1, 12)[0], x.tensor_split([n], 1)[1] * 1,
    ]  # fmt: skip


@graphs((4, 6), 0.5, modes="train symbolic")
def numbers_of_the_caller(m, x, s):
    parts = x.split(2, 1)
    return (
        torch.cat([p * s for p in parts], 1),
        [F.leaky_relu(p, s) for p in parts],
        [p.clamp(-s, s) for p in parts],
        [torch.add(p, 1, alpha=s) for p in parts],
        [p + s for p in parts] + [p - s for p in parts],
        [F.dropout(p, 0.5 if s > 9 else 0.0) for p in parts],
        [F.layer_norm(p, (2,), eps=1e-5 * s) for p in parts],
    )


@graphs((4, 6), True, modes="train")
def a_flag_of_the_caller(m, x, flag):
    parts = x.split(2, 1) if flag else x.split(3, 1)
    return torch.cat([p.relu() if flag else p for p in parts], 1), F.dropout(x, 0.5, not flag)


@graphs(
    (4, 15),
    modules=lambda: {"l": _linears(3, 5, 5), "n": nn.LayerNorm(5)},
    modes="single empty symbolic",
)
def batch_of_one_and_none(m, x):
    parts = x.split(5, 1)
    a = [m.n(lin(p)).relu() for lin, p in zip(m.l, parts)]
    return (
        torch.cat(a, 1), torch.stack(a, 1).sum(1), [m.l[0](p) for p in parts],
        [lin(parts[0]) for lin in m.l], torch.stack(a).amax(0), torch.stack(x.unbind(1)),
        torch.bmm(torch.stack(a, 1), torch.stack(a, 2)), [p.sum(1) for p in parts],
        [p.sum(0) for p in parts], [p.softmax(1) for p in parts],
        torch.cat([p.unsqueeze(1) for p in a], 1), torch.cat(a, 0),
        [p @ m.l[0].weight for p in parts], torch.einsum("bi,bj->bij", a[0], a[1]),
        x.view(x.shape[0], 3, 5).transpose(0, 1) @ m.l[0].weight,
    )  # fmt: skip


@graphs((4, 3, 6), modules=lambda: {"l": _linears(3, 6, 4)}, modes="single empty symbolic dynamic")
def sequences_of_one_and_none(m, x):
    rows = x.unbind(1)
    return (
        [lin(p) for lin, p in zip(m.l, rows)], [lin(x) for lin in m.l], [m.l[0](p) for p in rows],
        torch.stack([lin(p) for lin, p in zip(m.l, rows)], 1).flatten(1),
        x.flatten(0, 1).view(-1, 3, 6) * 1, (x @ x.mT).softmax(-1) @ x,
        x.transpose(0, 1).flatten(1), x.mean(0), x.sum((0, 1)),
    )  # fmt: skip


@graphs((4, 6), modes="dynamic")
def batch_is_folded_into_columns(m, x):
    b = x.shape[0]
    y = x.view(b * 2, 3)
    return [
        torch.cat([y[:, :1], y[:, 1:]], 1).view(b, 6), y.view(b, 2, 3).unbind(1), y.split(b),
        y[:b] + y[b:], torch.cat(y.split(b), 1), x.repeat(2, 1).split(b)[0] * 1,
        x.repeat_interleave(2, 0).view(b, 2, 6), torch.stack([x, x.exp()]).view(2 * b, 6),
        torch.cat([x, x.exp()]).view(2, b, 6).unbind(),
        x.unflatten(0, (2, b // 2)).flatten(0, 1) * 1, torch.cat(x.chunk(2)) + 0, x[b // 2 :] * 1,
        x.t().reshape(3, -1), torch.tensor_split(x, 3)[0] + 1,
    ]  # fmt: skip


@graphs((4, 6), (4, 6), modules=lambda: {"l": _linears(2, 6, 3)}, modes="dynamic symbolic")
def two_batches_of_unlike_size(m, x, y):
    return (
        m.l[0](x),
        m.l[0](y),
        m.l[1](x),
        m.l[1](y),
        torch.cat([m.l[0](x), m.l[1](y)]),
        x.relu(),
        y.relu(),
    )


@graphs((4, 6), (3, 6), modules=lambda: {"w": nn.Linear(6, 3)}, modes="train symbolic")
def one_weight_on_unlike_numbers_of_rows(m, x, y):
    return (
        m.w(x),
        m.w(y),
        m.w(x[:2]),
        m.w(y[0]),
        torch.cat([m.w(x), m.w(y)]),
        m.w(torch.cat([x, y])),
    )


@graphs((4, 6), modes="train symbolic")
def sizes_are_returned_and_compared(m, x):
    y = x if x.shape[0] > 3 else x * 2
    parts = y.split(2, 1)
    return (
        x.shape,
        x.numel(),
        len(parts),
        torch.cat(parts, 1),
        y.dim(),
        parts[0].size(),
        x.stride(0),
    )


@graphs((4, 8), modes="train symbolic")
def unlike_cuts_of_one_tensor(m, x):
    return [
        torch.cat([a * 2 for a in x.split([1, 3, 4], 1)], 1), torch.cat(x.split([4, 4], -1), -1),
        [p.exp() for p in x.split([2, 2, 2, 2], 1)], x.split(3, 1)[2] + 1, x.split(100, 1)[0] + 1,
        x.chunk(3, 1)[-1] + 1, x.chunk(5, -1), x.tensor_split(3, 1),
        x.tensor_split((2, 2, 5), dim=-1), x.tensor_split([-2], 1), x.hsplit([1, 6]),
        x.vsplit(2)[1] if x.shape[0] == 4 else x * 1,
        torch.split(x, split_size_or_sections=[6, 2], dim=1), x.split_with_sizes([8, 0], 1)[1],
        x.unbind(-1)[3] * 2, x.unsafe_chunk(2, 1)[0] + 1, x.unsafe_split(4, 1)[1] + 1,
        torch.cat(x.unsafe_split(4, 1), 1), x.unflatten(1, (2, 4)).unbind(1),
        x.unfold(1, 4, 4).unbind(1),
    ]  # fmt: skip


@graphs((4, 8), torch.tensor(2), modes="train")
def places_that_are_tensors(m, x, at):
    return (
        x.narrow(1, torch.tensor(1), 2) * 2,
        torch.narrow(x, 1, at, 3),
        x[:, at],
        x[:, at] + x[:, 2],
    )


@graphs((4, 2, 3, 4), modes="train symbolic")
def four_dimensions(m, x):
    a, b = x.unbind(1)
    return [
        torch.stack([a, b], 1), torch.stack([a, b], -1), torch.cat([a, b], -2),
        torch.cat([a, b], 1), x.permute(0, 2, 1, 3).flatten(2), x.permute(3, 0, 1, 2).unbind(2),
        x.movedim((1, 2), (2, 1)) * 1, x.swapaxes(1, 3).sum(-1),
        x.flatten(1, 2).unflatten(1, (2, 3)).unbind(1), x.mean((1, 2)), x.mT @ x,
        [p.softmax(-1) for p in x.split(1, 1)], [p.softmax(1) for p in x.unbind(2)],
        x[:, 1:, ..., 0], [F.layer_norm(p, (3, 4)) for p in (a, b)], x[:, :, -1, 1:3],
        x[..., 1, None, :], x.rot90(1, (1, 2)), torch.einsum("bhnd,bhmd->bhnm", x, x),
        torch.cat([x[:, :, 0], x[:, :, 1], x[:, :, 2]], 2),
    ]  # fmt: skip


@graphs((4, 6), modes="train")
def dimensions_by_name(m, x):
    parts = torch.split(tensor=x, split_size_or_sections=2, dim=1)
    return [
        torch.cat(tensors=parts, dim=-1), torch.stack(tensors=parts, dim=-2),
        torch.cat(parts, axis=1), torch.unbind(input=x, dim=1)[0] + 1,
        torch.chunk(input=x, chunks=2, dim=-1)[1] * 2,
        torch.narrow(input=x, dim=-1, start=-2, length=2), torch.select(input=x, dim=-1, index=-1),
        torch.sum(input=x, dim=1, keepdim=True), torch.softmax(input=x, dim=-1), x.softmax(dim=0),
        F.softmax(input=x, dim=1), torch.transpose(input=x, dim0=0, dim1=-1),
        x.permute(dims=(1, 0)), torch.mul(input=x, other=2), torch.add(input=x, other=x, alpha=3),
        F.relu(input=x, inplace=False), F.linear(input=x, weight=x, bias=None),
        torch.clamp(input=x, max=1), torch.flatten(input=x), F.normalize(input=x, dim=0, p=1.0),
        F.layer_norm(input=x, normalized_shape=[6], eps=1e-3),
        torch.reshape(input=x, shape=(-1, 3)), torch.unsqueeze(input=x, dim=-1),
        x.expand(size=(4, 6)), torch.where(condition=x > 0, input=x, other=-x),
        F.gelu(input=x, approximate="tanh"), torch.matmul(input=x, other=x.t()),
        torch.einsum("ij,kj->ik", x, x), x.mean(dim=(0, 1)),
        torch.div(input=x, other=2, rounding_mode="floor"),
        torch.movedim(x, source=0, destination=1), F.dropout(input=x, p=0.5, training=False),
        x.flatten(start_dim=0, end_dim=-1), x.to(dtype=torch.float64),
        torch.amax(input=x, dim=[1]), x.amax(-1, keepdim=True), x.view(size=(2, 12)),
        x.split(split_size=3, dim=1),
    ]  # fmt: skip
