"""Graphs whose attributes, types and special values a match may forget."""

# ruff: noqa: B905 (of unequal lengths on purpose)

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()
INTS = torch.tensor([[-7, 3, 0, 5, -2, 9], [1, -1, 4, -4, 8, -8], [2, 2, 3, 3, 0, 0], [6] * 6])
SPECIAL = torch.randn(4, 6)
SPECIAL[0, 0], SPECIAL[1, 2], SPECIAL[2, 4] = float("nan"), float("inf"), float("-inf")
SPECIAL[3, 1], SPECIAL[3, 3] = -0.0, 0.0


@graphs((4, 6))
def alphas(m, x):
    a, b, c = x.split(2, 1)
    return torch.cat([torch.add(a, b, alpha=2), torch.add(b, c, alpha=2.0), c.sub(a, alpha=-1)], 1)


@graphs(INTS)
def integer_alphas_and_divisions(m, x):
    a, b, c = x.split(2, 1)
    one = [torch.div(p, 2, rounding_mode=r) for p, r in zip((a, b, c), ("floor", "trunc", None))]
    return one, [p // 2 for p in (a, b, c)], [p % 3 for p in (a, b, c)], [p / 2 for p in (a, b)]


@graphs(INTS)
def integer_reductions(m, x):
    parts = x.split(2, 1)
    flags = [(p > 0) for p in parts]
    return [p.sum(1) for p in parts], [f.sum(1) for f in flags], [f.any(1) for f in flags]


@graphs(INTS.to(torch.int8) * 9)
def small_integers_overflow(m, x):
    parts = [p * 3 + 100 for p in x.split(2, 1)]
    return torch.cat(parts, 1), torch.stack([p.sum(1) for p in parts]), [p.amax(1) for p in parts]


@graphs(INTS, (4, 6), modes="train")
def promoting_sums(m, i, x):
    a, b = i.split(3, 1)
    c, d = x.split(3, 1)
    return a + c, b + d, torch.cat([a + 0.5, b + 1], 1), a * True, torch.cat([a, c], 1)


@graphs((4, 6))
def scalars_as_tensors(m, x):
    a, b, c = x.bfloat16().split(2, 1)
    s = [torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64), torch.tensor(4)]
    return torch.cat([a * s[0], b * s[1], c * s[2]], 1)


@graphs(
    (4, 6),
    modules=lambda: {"s": nn.ParameterList(torch.randn(()) for _ in range(3))},
    coarse=True,
)
def scalar_parameters_do_not_promote(m, x):
    parts = x.bfloat16().split(2, 1)
    return torch.stack([torch.tanh(p * s) for p, s in zip(parts, m.s, strict=True)], 1)


@graphs((4, 6), modules=lambda: {"s": nn.ParameterList(torch.randn(1) for _ in range(3))})
def one_element_parameters(m, x):
    return torch.stack([torch.tanh(p * s) for p, s in zip(x.split(2, 1), m.s)], 1)


@graphs(SPECIAL)
def special_values_stay_in_their_branch(m, x):
    parts = x.split(2, 1)
    a = [F.softmax(p, 1) for p in parts]
    b = [F.layer_norm(p, (2,)) for p in parts]
    c = [torch.nan_to_num(p, nan=n) for p, n in zip(parts, (0.0, 1.0, 1.0))]
    return a, b, c, [p.sum(1) for p in parts], [p.amax(1) for p in parts]


@graphs(SPECIAL, modules=lambda: {"l": nn.ModuleList(nn.Linear(2, 1) for _ in range(3))})
def special_values_through_linears(m, x):
    return [lin(p) for lin, p in zip(m.l, x.split(2, 1), strict=True)], m.l[0](x[:, 1:3])


@graphs(torch.tensor([[0.0, -0.0, 1.0, -1.0, 0.0, -0.0]] * 4))
def signed_zeros(m, x):
    a, b, c = x.split(2, 1)
    return a + 0.0, b + -0.0, torch.copysign(a, c), 1 / (a + 0), x * 0.0, x * -0.0, -0.0 - x


@graphs((4, 6))
def reversed_operands(m, x):
    a, b, c = x.split(2, 1)
    return 1 - a, a - 1, 2**b, b**2, 1 / (c * c + 1), torch.rsub(a, b), torch.sub(1.0, c), 2 - b


@graphs((4, 6))
def clamps(m, x):
    a, b, c = x.split(2, 1)
    lo = torch.zeros(2)
    return [
        a.clamp(0),
        b.clamp(max=0),
        c.clamp(-1, 1),
        torch.clamp(a, min=lo),
        b.clip(0, None),
        torch.clamp(c, lo, lo + 1),
        F.hardtanh(a, 0.0, 0.5),
        F.relu6(b),
    ]


@graphs((4, 6))
def slopes_and_approximations(m, x):
    parts = x.split(2, 1)
    a = [F.leaky_relu(p, s) for p, s in zip(parts, (0.1, 0.2, 0.2))]
    b = [F.gelu(p, approximate=s) for p, s in zip(parts, ("none", "tanh", "tanh"))]
    c = [F.elu(p, alpha=s) for p, s in zip(parts, (1.0, 0.5, 0.5))]
    d = [F.softplus(p, beta=s) for p, s in zip(parts, (1, 2, 2))]
    e = [F.threshold(p, s, 20.0) for p, s in zip(parts, (0.1, 0.1, 0.2))]
    return a, b, c, d, e


@graphs((4, 6))
def wheres_and_fills(m, x):
    a, b, c = x.split(2, 1)
    one = torch.where(a > 0, a, 0.0)
    two = torch.where(b > 0, 1.0, b)
    three = c.masked_fill(c > 0, torch.tensor(3))
    return torch.cat([one, two, three], 1), torch.where(a > 0, 1, 0), torch.lerp(a, b, 0.3)


@graphs((4, 6))
def lerps_and_addcmuls(m, x):
    a, b, c = x.split(2, 1)
    return [torch.lerp(a, b, 0.3), torch.lerp(b, c, c.sigmoid()), torch.lerp(a, c, 0.3)], [
        torch.addcmul(a, b, c, value=2),
        torch.addcmul(b, c, a, value=2.0),
        torch.addcmul(a, b, c),
        torch.addcdiv(a, b, c.exp()),
    ]


@graphs((4, 6))
def norms_with_other_attributes(m, x):
    parts = x.split(2, 1)
    a = [F.normalize(p, p=q, dim=1) for p, q in zip(parts, (2.0, 1.0, float("inf")))]
    b = [F.layer_norm(p, (2,), eps=e) for p, e in zip(parts, (1e-5, 1e-5, 1e-1))]
    c = [F.rms_norm(p, (2,), eps=e) for p, e in zip(parts, (None, 1e-5, None))]
    d = [F.normalize(p * 0, eps=e) for p, e in zip(parts, (1e-12, 1e-12, 1e-3))]
    return a, b, c, d


@graphs((4, 2, 6))
def norms_over_two_dimensions(m, x):
    parts = x.split(3, 2)
    w = torch.arange(6.0).view(2, 3)
    a = [F.layer_norm(p, (2, 3), w, w + i) for i, p in enumerate(parts)]
    return (
        a,
        [F.layer_norm(p, [3], w[i]) for i, p in enumerate(parts)],
        F.layer_norm(x, x.shape[1:]),
    )


@graphs((4, 6))
def softmaxes(m, x):
    parts = x.split(2, 1)
    a = [p.softmax(-1) for p in parts]
    b = [F.softmax(p, dim=d) for p, d in zip(parts, (0, 1, 0))]
    c = [F.log_softmax(p, 1, dtype=torch.float64) for p in parts]
    return a, b, c, [torch.softmax(p.bfloat16(), 1, torch.float32) for p in parts]


@graphs((4, 2, 6))
def reductions_spelled_otherwise(m, x):
    a, b, c = x.split(2, 2)
    return [
        torch.sum(a, (0, -1)), torch.sum(b, dim=[2, 0]), c.sum((-3, 2), keepdim=True),
        a.mean(axis=1), b.mean(1, True), c.sum(), a.amax((1, 2)), b.amax(dim=(2, 1)),
        c.sum(1, dtype=torch.float64), a.max(1).values, b.max(1)[1], c.logsumexp(1),
        a.var(1), b.std(1, correction=0), c.norm(dim=1), a.prod(1),
    ]  # fmt: skip


@graphs((4, 6), modules=lambda: {"d": nn.Dropout(0.5), "e": nn.AlphaDropout(0.3)})
def dropouts(m, x):
    a, b, c = x.split(2, 1)
    return [
        m.d(a), m.d(b), m.e(c), F.dropout(a, 0.0), F.dropout(b, 1.0), F.dropout(c, 0.5, False),
        F.dropout(a), F.dropout(b, training=m.training), torch.rand_like(c),
        x.new_empty(2).normal_(),
    ]  # fmt: skip


@graphs((4, 6), modes="train")
def random_between_equal_calls(m, x):
    a = torch.rand(4, 6)
    b = torch.rand(4, 6)
    y = (x + a).relu() + torch.randn_like(x)
    z = (x + a).relu() + torch.bernoulli(torch.full_like(x, 0.5))
    return y, z, torch.randint(0, 9, (3,)), torch.randperm(4), b, torch.normal(x.detach(), 1.0)


@graphs((4, 6))
def inplace_activations_and_dropout(m, x):
    parts = [p * 1 for p in x.split(2, 1)]
    return [
        F.relu(parts[0], True),
        F.dropout(parts[1], 0.5, True, True),
        F.relu6(parts[2], inplace=True),
    ]


@graphs((4, 6))
def casts(m, x):
    a, b, c = x.split(2, 1)
    return [
        a.bfloat16().float(), b.to(torch.float64), c.to(torch.int32), a.to(b.dtype), b.type_as(x),
        c.half() + 1, a.to("cpu"), a.float(), b.to(torch.float32, copy=True),
        x.double().split(3, 1),
    ]  # fmt: skip


@graphs((4, 6))
def bf16_among_fp32(m, x):
    a, b, c = x.split(2, 1)
    b = b.bfloat16()
    return torch.cat([a.tanh(), b.tanh(), c.tanh()], 1), torch.cat([b, b], 1), [b.sum(1), c.sum(1)]


@graphs((4, 6))
def comparisons(m, x):
    a, b, c = x.split(2, 1)
    return [
        a > 0,
        b > 0,
        c > 0.5,
        a == b,
        b != c,
        a.isnan(),
        torch.logical_and(a > 0, b > 0),
        ~(c > 0),
    ]


@graphs(
    (4, 6), modules=lambda: {"e": nn.Embedding(5, 3, padding_idx=1, max_norm=0.5)}, modes="train"
)
def embedding_with_max_norm(m, x):
    i = torch.tensor([[0, 1, 2], [3, 4, 0]])
    before = m.e.weight.detach().sum()
    return m.e(i[0]), m.e(i[1]), before, m.e.weight.detach().sum()


@graphs((4, 6), modules=lambda: {"e": nn.Embedding(5, 3, padding_idx=1, scale_grad_by_freq=True)})
def embedding_twice(m, x):
    i = torch.tensor([0, 1, 1, 2])
    return m.e(i), m.e(i), F.embedding(i, m.e.weight), F.embedding(i, m.e.weight, padding_idx=2)


@graphs((4, 6))
def tuples_of_results(m, x):
    v, i = x.max(1)
    w, j = torch.max(x, dim=1)
    s = x.sort(1)
    t = torch.topk(x, 2, 1)
    return v + w, i + j, s[0], s.indices, t[-1], t.values, torch.aminmax(x.detach(), dim=1).max, s


@graphs(
    (4, 6),
    modules=lambda: {"w": nn.Parameter(torch.randn(6, 3)), "b": nn.Parameter(torch.randn(4, 3))},
)
def scaled_products(m, x):
    w, b = m.w, m.b
    return [
        torch.addmm(b[0], x, w, beta=2), torch.addmm(b[0], x, w, alpha=0.5),
        torch.addmm(b[0, :1], x, w),
        torch.addmm(b[:1], x, w), F.linear(x, w.t(), b[0, :1]), x @ w + b[:1], x @ w + 1,
        x @ w @ w.t(),
        torch.baddbmm(b[:1].expand(1, 3)[None], x[None], w[None], beta=0.5),
        torch.addmv(b[0], w.t(), x[0]),
    ]  # fmt: skip


@graphs((4, 6), coarse=True)
def half_sums(m, x):
    y = x.bfloat16() * 100
    a, b, c = y.split(2, 1)
    return (
        [a.sum(1), b.sum(1)],
        [a.sum(1, dtype=torch.float32)],
        (a * b).sum(0),
        y.mean(0),
        c.cumsum(1),
    )


@graphs((4, 6))
def nan_in_unused_branch_has_gradient(m, x):
    a, b = x.split(3, 1)
    safe = torch.where(a > 1e9, torch.sqrt(-a.abs() - 1), a)
    return safe, torch.where(b > 1e9, torch.sqrt(-b.abs() - 1), b)


@graphs((4, 6))
def pairwise_maxima_with_ties(m, x):
    a, b, c = x.round().split(2, 1)
    return torch.maximum(a, b), torch.maximum(b, c), a.amax(1), b.amax(1), torch.minimum(c, c)


@graphs((4, 6))
def cumulative_and_sorted(m, x):
    parts = x.split(2, 1)
    return [p.cumsum(0) for p in parts], [p.flip(0) for p in parts], [p.roll(1, 0) for p in parts]
