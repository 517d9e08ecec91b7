"""Graphs of matrix products in every wording, and of weights that are no plain parameters."""

# ruff: noqa: B905 (of unequal lengths on purpose)

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()


def _param(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def _linears(count, *sizes, **options):
    return nn.ModuleList(nn.Linear(*sizes, **options) for _ in range(count))


@graphs((4, 6), modules=lambda: {"w": _param(6), "v": _param(3, 6), "b": _param()})
def vectors_among_linears(m, x):
    return [
        F.linear(x, m.w), F.linear(x[0], m.w, m.b), F.linear(x[0], m.v), F.linear(x[0], m.w),
        x @ m.w, m.v @ x[0], x[0] @ m.w, torch.mv(x, m.w), torch.dot(x[0], m.w),
        torch.outer(x[0], m.w), torch.matmul(m.w, x.t()), torch.inner(x, m.v),
        torch.tensordot(x, m.v, ([1], [1])), torch.inner(x, m.w), torch.linalg.vecdot(x, m.w),
        torch.vdot(x[0], m.w), torch.linalg.multi_dot([x, m.v.t(), m.v]),
        torch.chain_matmul(x, m.v.t(), m.v), (x * m.w).sum(1), (x * m.w).sum(-1, keepdim=True),
        torch.ger(x[0], m.w),
    ]  # fmt: skip


@graphs(
    (4, 2, 6),
    modules=lambda: {"w": _param(6, 3), "b": _param(3), "s": _param(4, 6, 3)},
    modes="train",
)
def scaled_sums_of_products(m, x):
    a, b = x[:, 0], x[:, 1]
    return [
        torch.addmm(m.b, a, m.w), torch.addmm(m.b, b, m.w), torch.addmm(m.b, a, m.w, beta=0),
        torch.addmm(m.b, b, m.w, beta=1.0, alpha=1), torch.addmm(m.b, a, m.w, beta=2, alpha=-1),
        m.b.expand(4, 3).addmm(a, m.w), torch.baddbmm(m.b, x, m.s),
        torch.baddbmm(m.b, x, m.s, beta=0.5), torch.baddbmm(m.b[None, None], x, m.s, alpha=3),
        torch.bmm(x, m.s), x.bmm(m.s), x.matmul(m.s), torch.baddbmm(torch.zeros(4, 2, 3), x, m.s),
        torch.addbmm(m.b.expand(2, 3), x, m.s), torch.addmv(m.b, m.w.t(), a[0]),
        torch.addr(torch.zeros(6, 3), a[0], m.b), torch.ops.aten.addmm(m.b, a, m.w),
        torch.ops.aten.mm.default(b, m.w), a.mm(m.w) + m.b,
    ]  # fmt: skip


@graphs(
    torch.tensor([[float("nan"), 1.0]] * 4),
    (4, 2),
    modules=lambda: {"w": _param(2, 2)},
    modes="train",
)
def nothing_added_of_nan(m, x, y):
    return [
        torch.addmm(x, y, m.w, beta=0), torch.addmm(x, y, m.w, beta=0.0),
        torch.addmm(y, x, m.w, alpha=0), torch.baddbmm(x[None], y[None], m.w[None], beta=0),
        F.linear(x, m.w), F.linear(y, m.w), x @ m.w, y @ m.w, 0 * (x @ m.w) + y,
        torch.addmm(x, y, m.w),
    ]  # fmt: skip


@graphs((4, 2, 6), modules=lambda: {"w": _param(6, 3), "v": _param(2, 6, 3), "u": _param(3, 6)})
def sums_by_letters(m, x):
    e = torch.einsum
    return [
        e("bnd,df->bnf", x, m.w), e("bnd,fd->bnf", x, m.u), e("bnd,ndf->bnf", x, m.v),
        e("bnd,ndf->nbf", x, m.v), e("bnd,ndf->fbn", x, m.v), e("bnd,df->fbn", x, m.w),
        e("bnd,bmd->bnm", x, x), e("bnd,bmd->bmn", x, x), e("bnd,cnd->nbc", x, x),
        e("bnd->dbn", x), e("bnd->bd", x), e("bnd,bnd->bn", x, x), e("bnd,bnd->", x, x),
        e("bnd,d->bn", x, m.w[:, 0]), e("...d,df->...f", x, m.w), e("b...d,df->b...f", x, m.w),
        e("bnd,ndf", x, m.v), e("bnd,ndf,fe->bne", x, m.v, torch.ones(3, 2)),
        e("bd,de,be->b", x[:, 0], m.w, x[:, 1, :3]), e(x, [0, 1, 2], m.w, [2, 3], [0, 1, 3]),
        e("BnD,Df->Bnf", x, m.w), e(" bnd , df -> bnf ", x, m.w), e("bnd,ndf->bf", x, m.v),
        e("bn,bm->bnm", x[:, 0], x[:, 1]), e("bij,bij->bij", x, x), e("ii->i", m.w[:3]),
        e("i,j->ij", m.w[0], m.w[1]), e("bnd,be->bnde", x, x[:, 0, :2]), e("bnd,bnd->nd", x, x),
        e("bnd,bn->bd", x, x[:, :, 0]), e("bd,bd,bd->bd", x[:, 0], x[:, 1], x[:, 0]),
    ]  # fmt: skip


@graphs((4, 2, 6), modules=lambda: {"w": _param(1, 6, 3), "v": _param(2, 6, 3), "u": _param(3, 6)})
def products_that_broadcast(m, x):
    y = x[:, :, None]
    return [
        x @ m.w, x @ m.w[0], y @ m.v, y @ m.w, y[:, :, 0] @ m.v[0], (y @ m.v).squeeze(2),
        x[:1] @ m.v[:1], m.u @ x.mT, m.u @ x.transpose(1, 2), m.v.mT @ x[0].unsqueeze(-1),
        x.unsqueeze(1) @ m.v, torch.matmul(x.unsqueeze(2), m.v).flatten(1),
        (x.transpose(0, 1) @ m.v).transpose(0, 1), torch.bmm(x.transpose(0, 1), m.v),
        torch.bmm(x.transpose(0, 1), m.v).permute(1, 0, 2), F.linear(x, m.u),
        F.linear(x.mT.mT, m.u), F.linear(x[:, 0], m.u) + F.linear(x[:, 1], m.u),
    ]  # fmt: skip


@graphs((4, 6), modules=lambda: {"w": _param(6, 6), "v": _param(3, 6)}, modes="train aot")
def weights_that_are_views(m, x):
    return [
        F.linear(x, m.w[:3]), F.linear(x, m.w[3:]), F.linear(x, m.v), F.linear(x, m.w[::2]),
        F.linear(x, m.w.t()), F.linear(x, m.w.t()[:3]), F.linear(x[:, :3], m.w[:, :3]),
        F.linear(x[:, 3:], m.w[:, 3:]), F.linear(x, m.w.view(6, 6)), F.linear(x, m.v.expand(3, 6)),
        F.linear(x, m.w.reshape(3, 2, 6)[:, 0]), F.linear(x, m.w.flip(0)),
        F.linear(x, m.w.chunk(2)[1]), F.linear(x, m.w[torch.tensor([0, 1, 0])]),
        F.linear(x, m.w.diagonal()), F.linear(x, m.v.detach()),
    ]  # fmt: skip


@graphs((4, 6), modules=lambda: {"w": _param(3, 6), "v": _param(3, 6), "m": torch.ones(3, 6)})
def weights_that_are_computed(m, x):
    a, b = m.w * 2, m.v.tanh()
    return [
        F.linear(x, a), F.linear(x, b), F.linear(x, m.w * m.m), F.linear(x, m.w + m.v),
        F.linear(x, F.normalize(m.w)), F.linear(x, F.normalize(m.v)), F.linear(x, m.w / m.w.norm()),
        F.linear(x, m.w.abs()), F.linear(x, torch.cat([m.w[:1], m.v[1:]])), F.linear(x, x[:3]),
        F.linear(x, m.w.softmax(1)), F.linear(x, m.v.softmax(1)), F.linear(x, x[1:] * x[0]),
        F.linear(x, m.w @ m.w.t() @ m.v), F.dropout(m.w, 0.0) @ x.t(),
    ]  # fmt: skip


def _normed(count, *sizes):
    return nn.ModuleList(parametrizations.weight_norm(nn.Linear(*sizes)) for _ in range(count))


@graphs((4, 6), modules=lambda: {"l": _normed(3, 2, 2), "r": _normed(2, 6, 3)}, modes="train eval")
def weight_norms(m, x):
    return [lin(p) for lin, p in zip(m.l, x.split(2, 1))], [lin(x) for lin in m.r]


def _spectral(count, *sizes):
    return nn.ModuleList(parametrizations.spectral_norm(nn.Linear(*sizes)) for _ in range(count))


@graphs((4, 6), modules=lambda: {"l": _spectral(3, 2, 2)}, modes="eval train")
def spectral_norms(m, x):
    return [lin(p) for lin, p in zip(m.l, x.split(2, 1))]


class _Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


def _symmetric(count, size):
    layers = _linears(count, size, size)
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", _Symmetric())
    return layers


@graphs((4, 6), modules=lambda: {"l": _symmetric(3, 2)})
def parametrized_weights(m, x):
    return torch.cat([lin(p).relu() for lin, p in zip(m.l, x.split(2, 1))], 1)


def _mixed_precision():
    layers = _linears(4, 6, 3)
    return nn.ModuleList([layers[0], layers[1].double(), layers[2].bfloat16(), layers[3].half()])


@graphs((4, 6), modules=lambda: {"l": _mixed_precision()}, coarse=True, modes="train")
def weights_of_unlike_types(m, x):
    return [lin(x.to(lin.weight.dtype)) for lin in m.l], [
        lin(x.to(lin.weight.dtype)) for lin in m.l
    ]


@graphs(
    (4, 6),
    modules=lambda: {"a": nn.Linear(6, 3), "b": nn.Linear(6, 3), "w": torch.randn(3, 6)},
)
def buffers_among_weights(m, x):
    return [
        m.a(x),
        F.linear(x, m.w),
        m.b(x),
        F.linear(x, m.w, m.a.bias),
        F.linear(x, m.b.weight, m.w[:, 0]),
    ]


def _with(frozen):
    layers = _linears(4, 2, 2)
    for i, parts in frozen.items():
        for name in parts:
            getattr(layers[i], name).requires_grad_(False)
    return layers


@graphs(
    torch.randn(4, 8),
    modules=lambda: {"l": _with({0: ["weight"], 1: ["bias"], 3: ["weight", "bias"]})},
    modes="train again",
)
def frozen_in_parts_without_input_gradient(m, x):
    return torch.cat([lin(p) for lin, p in zip(m.l, x.split(2, 1))], 1), [
        lin(x[:, :2]) for lin in m.l
    ]


def _tied(count, *sizes):
    layers = _linears(count, *sizes)
    layers[1].weight = layers[0].weight
    layers[2].bias = layers[0].bias
    return layers


@graphs((4, 8), modules=lambda: {"l": _tied(4, 2, 2)}, modes="train again")
def tied_in_parts(m, x):
    parts = x.split(2, 1)
    return torch.cat([lin(p) for lin, p in zip(m.l, parts)], 1), [lin(parts[0]) for lin in m.l]


@graphs(
    (4, 8),
    modules=lambda: {"l": nn.ModuleList([*_linears(3, 2, 2), *_linears(1, 2, 2, bias=False)])},
)
def one_without_bias(m, x):
    parts = x.split(2, 1)
    return torch.cat([lin(p) for lin, p in zip(m.l, parts)], 1), [lin(parts[1]) for lin in m.l]


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)}, modes="train single")
def linears_on_unlike_ranks(m, x):
    a, b, c = x.split(2, 1)
    return (
        m.l[0](a),
        m.l[1](b.unsqueeze(1)),
        m.l[2](c[0]),
        m.l[0](b[None, None]),
        m.l[1](c.flatten()[:2]),
    )


@graphs((4, 6), modules=lambda: {"l": _linears(4, 6, 6)}, modes="train autocast aot")
def residual_blocks(m, x):
    for lin in m.l:
        x = x + F.gelu(lin(F.layer_norm(x, (6,))))
    return x, [lin(x) for lin in m.l]


@graphs((4, 6), modules=lambda: {"b": nn.Bilinear(6, 6, 2), "c": nn.Bilinear(3, 3, 2)})
def bilinears(m, x):
    a, c = x.split(3, 1)
    return m.b(x, x), m.c(a, c), m.c(c, a), F.bilinear(a, c, m.c.weight)


@graphs(
    (4, 2, 6),
    modules=lambda: {"c": nn.Conv1d(2, 4, 1), "d": nn.Conv1d(2, 4, 1), "e": nn.Conv1d(2, 4, 3)},
)
def convolutions(m, x):
    return (
        m.c(x),
        m.d(x),
        m.e(x),
        torch.cat([m.c(x), m.d(x)], 1),
        m.c(x[:, :, :3]),
        F.conv1d(x, m.c.weight),
    )


@graphs(
    (4, 3, 6),
    modules=lambda: {"a": nn.MultiheadAttention(6, 2, batch_first=True)},
    modes="train eval",
)
def attention_module(m, x):
    a, w = m.a(x, x, x)
    b, _ = m.a(x, x * 2, x, need_weights=False)
    return a, w, b


@graphs(
    (4, 3, 6),
    modules=lambda: {"g": nn.GRU(6, 4, batch_first=True), "c": nn.LSTMCell(6, 4)},
    modes="train",
)
def recurrent(m, x):
    return m.c(x[:, 0]), m.c(x[:, 1]), [F.linear(p, m.c.weight_ih) for p in x.unbind(1)]


@graphs(
    (4, 3, 6),
    modules=lambda: {"t": nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)},
    modes="train",
)
def transformer_layer(m, x):
    return m.t(x), m.t(x.flip(1))


@graphs(
    (4, 6), modules=lambda: {"l": _linears(2, 6, 6), "s": _linears(2, 6, 6)}, modes="train autocast"
)
def cross_network(m, x):
    y = x
    for lin in m.l:
        y = x * lin(y) + y
    z = x
    for lin in m.s:
        z = z + x * (z @ lin.weight[:, :1])
    return torch.cat([y, z], 1), y * m.s[0](y) + x


@graphs(
    (4, 3, 6),
    modules=lambda: {"w": _param(6, 4), "i": torch.triu_indices(3, 3, 1)},
    modes="train aot",
)
def dots_in_many_words(m, x):
    z, i, j = x @ x.mT, m.i[0], m.i[1]
    parts = x.unbind(1)
    return [
        z[:, i, j], torch.bmm(x, x.transpose(1, 2))[:, i, j],
        torch.einsum("bnd,bmd->bnm", x, x)[:, i, j],
        torch.stack([(parts[0] * parts[1]).sum(1), (parts[0] * parts[2]).sum(1)], 1), z.triu(1),
        torch.cat([x[:, 0], z[:, i, j]], 1), torch.cat([x[:, 0], z.flatten(1)], 1),
        z.tril(-1).flatten(1), (x.sum(1) ** 2 - (x**2).sum(1)) * 0.5, (x[:, i] * x[:, j]).sum(-1),
        x.mT @ (x @ m.w), (x.unsqueeze(1) * x.unsqueeze(2)).sum(-1)[:, i, j],
    ]  # fmt: skip


@graphs((4, 6), modules=lambda: {"w": _param(6, 6)}, modes="train")
def powers_of_a_matrix(m, x):
    return [
        torch.matrix_power(m.w, 2), m.w @ m.w, x @ m.w @ m.w, (x @ m.w) @ m.w.t(), x @ (m.w @ m.w),
        F.linear(F.linear(x, m.w), m.w), m.w.t() @ m.w, F.linear(m.w, m.w), torch.linalg.det(m.w),
    ]  # fmt: skip


@graphs(
    torch.randn(4, 6, dtype=torch.complex64),
    modules=lambda: {"w": _param(3, 6, dtype=torch.complex64)},
    modes="train",
)
def complex_products(m, x):
    return [
        abs(F.linear(x, m.w)), abs(x @ m.w.t()), abs(x @ m.w.mH),
        abs(torch.einsum("bd,fd->bf", x, m.w)),
        abs(torch.cat([F.linear(x, m.w), F.linear(x, m.w.conj())], 1)),
        torch.view_as_real(x @ m.w.adjoint()), [abs(p).sum(1) for p in x.split(2, 1)],
        [(p * p.conj()).real for p in x.split(2, 1)],
    ]  # fmt: skip


@graphs(torch.randint(0, 5, (4, 6)), torch.randint(0, 5, (6, 3)), modes="train")
def integer_products(m, x, w):
    return [
        x @ w, torch.einsum("bd,df->bf", x, w), torch.mm(x, w), F.linear(x, w.t()), x[0] @ w,
        torch.bmm(x[None], w[None]), torch.einsum("bd,df->fb", x, w), F.linear(x, w.t(), w[0]),
    ]  # fmt: skip
