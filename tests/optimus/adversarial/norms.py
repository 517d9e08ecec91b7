"""Graphs of norms, dropouts and embeddings: state, options and modes that a match may overlook."""

# ruff: noqa: B905 (of unequal lengths on purpose)

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()
ALL = "train eval"
ACTIVATIONS = [
    F.relu, F.relu6, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.tanh, F.sigmoid, F.softplus,
    F.softsign, F.hardswish, F.hardsigmoid, F.hardtanh, F.tanhshrink, F.softshrink, F.hardshrink,
    F.logsigmoid, F.leaky_relu,
]  # fmt: skip
IDS = torch.tensor([[0, 1, 4], [2, 2, 3], [1, 0, 0], [4, 4, 4]])


def _param(*shape):
    return nn.Parameter(torch.randn(*shape))


def _many(kind, count, *sizes, **options):
    return nn.ModuleList(kind(*sizes, **options) for _ in range(count))


def _seeded(modules):
    """Away from ones and zeros, so that mistaken scales and shifts show."""
    for module in modules.modules():
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)
    return modules


def _towers(kind, *sizes, count=3, **options):
    return {"n": _seeded(_many(kind, count, *sizes, **options))}


@graphs((4, 6), modules=lambda: _towers(nn.BatchNorm1d, 2, momentum=None), modes="train eval again")
def averages_over_all_batches(m, x):
    a, b, c = x.split(2, 1)
    a = m.n[0](a)
    b = m.n[1](b)
    return a, b, m.n[2](c), m.n[2].num_batches_tracked + 0


@graphs((4, 6), modules=lambda: _towers(nn.BatchNorm1d, 2, affine=False), modes="train eval again")
def batch_norms_without_scale(m, x):
    return torch.cat([n(p).relu() for n, p in zip(m.n, x.split(2, 1))], 1), m.n[2].running_var


@graphs((4, 6), modules=lambda: _towers(nn.BatchNorm1d, 2), modes="train eval dynamic")
def one_norm_in_another_mode(m, x):
    n = m.n[1]
    a, b, c = x.split(2, 1)
    y = F.batch_norm(b, n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, n.eps)
    return m.n[0](a), y, m.n[2](c)


@graphs((4, 6), modules=lambda: _towers(nn.BatchNorm1d, 2), modes="train again")
def one_norm_three_times(m, x):
    return torch.cat([m.n[0](p) for p in x.split(2, 1)], 1), m.n[0].running_mean


@graphs(
    (4, 2, 6),
    modules=lambda: _towers(nn.BatchNorm1d, 2) | {"k": _seeded(_many(nn.BatchNorm1d, 3, 2))},
)
def batch_norms_of_three_dimensions(m, x):
    return [n(p) for n, p in zip(m.n, x.split(2, 2))], [
        n(p) for n, p in zip(m.k, x[:, 0].split(2, 1))
    ]


@graphs((4, 6), modules=lambda: _towers(nn.BatchNorm1d, 2), modes=ALL)
def batch_norms_partly_frozen(m, x):
    parts = x.split(2, 1)
    with torch.no_grad():
        y = m.n[0](parts[0])
    return y, m.n[1](parts[1]), m.n[2](parts[2].detach())


@graphs((4, 6), modules=lambda: _towers(nn.BatchNorm1d, 2), modes="train")
def statistics_read_between(m, x):
    a, b, c = x.split(2, 1)
    y = m.n[0](a)
    before = m.n[1].running_mean.clone()
    z = m.n[1](b)
    return y, z * m.n[0].running_var, before, m.n[2](c) - m.n[1].running_mean


@graphs(
    (4, 2, 3),
    modules=lambda: _towers(nn.LayerNorm, (2, 3)) | {"m": _seeded(_many(nn.LayerNorm, 3, 3))},
)
def layer_norms_over_more(m, x):
    y = [x * (i + 1) for i in range(3)]
    a = [n(p) for n, p in zip(m.n, y)]
    return a, [n(p) for n, p in zip(m.m, y)], [n(p) for n, p in zip(m.m, x.unbind(1))]


@graphs(
    (4, 15),
    modules=lambda: (
        _towers(nn.LayerNorm, 5, elementwise_affine=False)
        | {"b": _seeded(_many(nn.LayerNorm, 3, 5, bias=False)), "w": _param(3, 5)}
    ),
    modes="train autocast",
)
def layer_norms_without_some(m, x):
    parts = x.split(5, 1)
    return (
        torch.cat([n(p) for n, p in zip(m.n, parts)], 1),
        torch.cat([n(p) for n, p in zip(m.b, parts)], 1),
        [F.layer_norm(p, (5,), None, w) for p, w in zip(parts, m.w)],
        [F.layer_norm(p, (5,), w, None if i else w) for i, (p, w) in enumerate(zip(parts, m.w))],
    )


@graphs((4, 6), modules=lambda: _towers(nn.LayerNorm, 2), coarse=True, modes="train")
def layer_norms_of_unlike_types(m, x):
    a, b, c = x.split(2, 1)
    half, w = x.bfloat16().split(2, 1), m.n[2].weight
    return [
        m.n[0](a), m.n[1](b), F.layer_norm(half[0], (2,)),
        F.layer_norm(half[1], (2,), w.bfloat16()), F.layer_norm(half[2], (2,)),
        F.layer_norm(c.double(), (2,)), F.layer_norm(c, (2,)),
    ]  # fmt: skip


@graphs((4, 6), modules=lambda: _towers(nn.RMSNorm, 2) | {"w": _param(3, 2)})
def rms_norms(m, x):
    parts = x.split(2, 1)
    return (
        torch.cat([n(p) for n, p in zip(m.n, parts)], 1),
        [F.rms_norm(p, (2,), eps=e) for p, e in zip(parts, (1e-3, 1e-3, None))],
        [torch.rms_norm(p, [2], w, 1e-5) for p, w in zip(parts, m.w)],
        [p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + 1e-6) * w for p, w in zip(parts, m.w)],
    )


@graphs(
    (4, 4, 6),
    modules=lambda: {
        "g": _seeded(_many(nn.GroupNorm, 3, 2, 4)),
        "h": nn.GroupNorm(1, 4),
        "i": _many(nn.InstanceNorm1d, 3, 4, affine=True),
    },
    modes=ALL,
)
def norms_over_groups(m, x):
    parts = x.split(2, 2)
    return (
        [n(p) for n, p in zip(m.g, parts)],
        [n(p) for n, p in zip(m.i, parts)],
        m.h(x),
        F.local_response_norm(x, 2),
    )


@graphs((4, 2, 6))
def norms_by_hand(m, x):
    parts = x.split(2, 2)
    return (
        [p / p.norm(dim=-1, keepdim=True) for p in parts],
        [p / (p.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6) for p in parts],
        [(p - p.mean(-1, keepdim=True)) / p.std(-1, keepdim=True) for p in parts],
        [(p - p.mean(0)) / (p.var(0, unbiased=False) + 1e-5).sqrt() for p in parts],
        [F.normalize(p, dim=d) for p, d in zip(parts, (-1, 2, 1))],
        [F.normalize(p, p=q, dim=-1) for p, q in zip(parts, (2, 2.0, 3))],
        [F.normalize(p, eps=e) for p, e in zip(parts, (1e-12, 1.0, 1.0))],
        [torch.linalg.vector_norm(p, dim=-1) for p in parts],
        [F.cosine_similarity(p, q, dim=-1) for p, q in pairwise(parts)],
    )


@graphs(
    (4, 6),
    modules=lambda: {"a": _many(nn.Dropout, 3, 0.5), "b": nn.Dropout(1.0), "c": nn.Dropout(0.0)},
)
def dropouts_of_each_kind(m, x):
    parts = x.split(2, 1)
    return (
        torch.cat([d(p) for d, p in zip(m.a, parts)], 1),
        [F.dropout(p, q, m.training) for p, q in zip(parts, (0.3, 0.3, 0.6))],
        m.b(x) + 1,
        m.c(x) + 1,
        [F.dropout(p, 0.5, False) for p in parts],
        torch.rand(2),
    )


@graphs(
    (4, 6),
    modules=lambda: {"a": nn.Dropout(0.5), "l": _many(nn.Linear, 3, 2, 2)},
    modes="train aot eval",
)
def dropout_between_layers(m, x):
    y = [m.a(lin(p).relu()) for lin, p in zip(m.l, x.split(2, 1))]
    z = [m.a(lin(p)) for lin, p in zip(m.l, y)]
    return torch.cat(z, 1), F.dropout(torch.cat(y, 1), 0.1, m.training)


@graphs((4, 2, 6), modes="train")
def random_of_each_kind(m, x):
    parts = x.split(2, 2)
    return (
        [F.rrelu(p, training=True) for p in parts],
        [F.gumbel_softmax(p, 0.5) for p in parts],
        [F.dropout1d(p, 0.5) for p in parts],
        [F.feature_alpha_dropout(p, 0.5, True) for p in parts],
        [torch.bernoulli(p.sigmoid()) for p in parts],
        [torch.rand_like(p) * p for p in parts],
        [torch.multinomial(p[:, 0].softmax(-1), 1) for p in parts],
    )


@graphs((4, 6), modules=lambda: {"p": _many(nn.PReLU, 3), "q": _many(nn.PReLU, 3, 2)})
def slopes_that_are_learned(m, x):
    parts = x.split(2, 1)
    return torch.cat([a(p) for a, p in zip(m.p, parts)], 1), [a(p) for a, p in zip(m.q, parts)]


@graphs((4, 6), modes="train")
def activations_of_every_kind(m, x):
    found = [torch.cat([f(p) for p in x.split(2, 1)], 1) for f in ACTIVATIONS]
    return found, [F.glu(p, 1) for p in x.split(2, 1)], [F.softmin(p, 1) for p in x.split(2, 1)]


@graphs((4, 6), modes="train symbolic")
def softmax_and_friends(m, x):
    parts = x.split(2, 1)
    return (
        [F.softmax(p, -1, dtype=t) for p, t in zip(parts, (None, torch.float64, torch.float32))],
        torch.stack([p.softmax(0) for p in parts]),
        torch.softmax(torch.stack(parts), 0).unbind(),
        [p.log_softmax(1).exp() for p in parts],
        [p.logsumexp(1) for p in parts],
        [(p - p.amax(1, keepdim=True)).exp() for p in parts],
        [p.exp() / p.exp().sum(1, keepdim=True) for p in parts],
        [p.cumsum(1) for p in parts],
        [p.cumprod(-1) for p in parts],
    )


@graphs((4, 2, 6), modes="train symbolic")
def reductions_in_other_words(m, x):
    parts = x.split(2, 2)
    return (
        [p.sum() for p in parts], [p.sum([]) for p in parts], [p.sum(()) for p in parts],
        [p.sum((1, 2)) for p in parts], [p.sum((-1, -2)) for p in parts],
        [p.mean((0, 1, 2)) for p in parts], [p.mean(1, dtype=torch.float64) for p in parts],
        [p.sum(axis=-1) for p in parts], [p.amax() for p in parts],
        [p.amin((0, 2), True) for p in parts], [p.max() for p in parts], [p.min(2) for p in parts],
        [p.argmax(2) for p in parts], [p.any() for p in parts],
        [torch.sum(p, 1, True) for p in parts], [p.nansum(2) for p in parts],
        [p.median(2)[0] for p in parts], torch.stack(parts).sum(0), torch.stack(parts, 1).mean(1),
        torch.stack(parts, -1).amax(-1), sum(parts), torch.cat(parts, 2).sum(2),
        torch.stack([p.sum(2) for p in parts], 1).sum(1),
    )  # fmt: skip


def _tables(count, **options):
    return {"e": _many(nn.Embedding, count, 5, 3, **options), "i": IDS}


@graphs((4, 6), modules=lambda: _tables(3), modes="train again")
def tables_of_features(m, x):
    rows = [e(m.i[:, k]) for k, e in enumerate(m.e)]
    return (
        torch.cat([*rows, x], 1),
        torch.stack(rows, 1).sum(1),
        [F.layer_norm(r, (3,)) for r in rows],
    )


@graphs((4, 6), modules=lambda: _tables(3, padding_idx=4), modes="train")
def padded_tables(m, x):
    rows = [e(m.i[:, k]) for k, e in enumerate(m.e)]
    pads = [F.embedding(m.i[:, 0], e.weight, padding_idx=p) for e, p in zip(m.e, (0, -1, None))]
    return torch.cat(rows, 1), pads, m.e[0](m.i).mean(1)


@graphs(
    (4, 6),
    modules=lambda: {"e": nn.EmbeddingBag(5, 3), "i": IDS, "o": torch.tensor([0, 2, 2, 5])},
    modes="train",
)
def bags_in_each_mode(m, x):
    w = m.e.weight
    bag = F.embedding_bag
    return [
        m.e(m.i), bag(m.i, w, mode="sum"), bag(m.i, w, mode="max"),
        bag(m.i[0], w, torch.tensor([0, 1])), bag(m.i.flatten(), w, m.o, mode="sum"),
        bag(m.i.flatten(), w, m.o, mode="sum", padding_idx=4),
        bag(m.i, w, mode="sum", per_sample_weights=x[:, :3].detach()),
    ]  # fmt: skip


@graphs(
    (4, 6),
    modules=lambda: {"e": nn.Embedding(5, 6), "i": IDS, "l": nn.Linear(6, 5, bias=False)},
    modes="train",
)
def table_tied_to_head(m, x):
    m.l.weight = m.e.weight
    h = m.e(m.i).mean(1) + x
    return m.l(h), F.linear(x, m.e.weight), m.e.weight[m.i[:, 0]], h @ m.e.weight.t()


@graphs((4, 6), modules=lambda: {"e": nn.Embedding(20, 4), "o": torch.tensor([0, 5, 10]), "i": IDS})
def one_table_with_offsets(m, x):
    rows = m.e(m.i + m.o)
    a, b, c = rows.unbind(1)
    first, second = rows[..., :1], rows[..., 1:]
    return (
        torch.cat([a, b, c], 1), rows.flatten(1), first.sum((1, 2)),
        second.sum(1) ** 2 - (second**2).sum(1), torch.stack([a * b, a * c, b * c], 1).sum(-1),
        torch.stack([a, b, c], 1).mean(1), rows.view(4, -1),
    )  # fmt: skip
