"""Graphs whose operands repeat, differ in type or number, or are scalars, empty or expanded."""

# ruff: noqa: B905, PLR0124 (of unequal lengths, and compared with itself, on purpose)

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()
BASE = torch.randn(4, 12)
INTS = torch.arange(24).view(4, 6) - 11


def _param(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(*shape).to(dtype))


def _scalars(*dtypes):
    return nn.ParameterList(nn.Parameter(torch.randn(()).to(d)) for d in dtypes)


@graphs((4, 6), modes="train symbolic")
def one_node_as_every_argument(m, x):
    a, b, c = x.split(2, 1)
    return [
        torch.cat([a, a, a], 1), torch.stack([b, b], 1), torch.cat([a, b, b, a], -1), a * a, b * b,
        c * c, torch.where(a > a, a, a), torch.lerp(b, b, b), torch.addcmul(c, c, c),
        torch.maximum(a, a), a / a, torch.cat([x, x], 0).split(4)[0],
        torch.stack([x, x]).unbind()[1],
    ]  # fmt: skip


@graphs((4, 6), modes="train")
def pairs_that_share_one_side(m, x):
    a, b, c = x.split(2, 1)
    return torch.cat([a * b, b * b, c * b], 1), torch.cat([a - c, b - c, c - c], 1), a * a + b * c


@graphs((4, 6), modes="train dynamic")
def pairs_crossed(m, x):
    a, b, c = x.split(2, 1)
    d, e, f = x.sin().split(2, 1)
    return (
        torch.cat([a * e, b * d, c * f], 1),
        torch.cat([a - d, e - b, c - f], 1),
        torch.stack([a / (f * f + 1), b / (e * e + 1), c / (d * d + 1)]),
    )


@graphs((4, 6), modes="train")
def broadcast_in_unlike_ways(m, x):
    a, b, c = x.split(2, 1)
    row, column = x[:1, :2], x[:, :1]
    return (
        torch.cat([a * row, b * column, c * a], 1),
        torch.stack([a + row, b + row, c + column]),
        [p * column[0] for p in (a, b, c)],
        torch.cat([a + column, b + x[:, 1:2], c + x[:, 2:3]], 1),
        [row * p for p in (a, b)] + [p * row for p in (a, b)],
    )


@graphs((4, 6), modules=lambda: {"s": _scalars(*[torch.float32] * 3)}, modes="train autocast")
def scalar_parameters_on_either_side(m, x):
    a, b, c = x.split(2, 1)
    s = m.s
    return (
        torch.cat([s[0] * a, b * s[1], s[2] * c], 1),
        torch.cat([a - s[0], s[1] - b, c - s[2]], 1),
        torch.stack([s[0], s[1], s[2]]) * 2,
        [p + s[0] for p in (a, b, c)],
        torch.stack([torch.tanh(t) for t in s]),
    )


@graphs((4, 6), modules=lambda: {"s": _scalars(torch.float64, torch.float32, torch.bfloat16)})
def scalar_parameters_of_unlike_types(m, x):
    return torch.cat([p * s for p, s in zip(x.split(2, 1), m.s)], 1), [p * 2 for p in m.s]


@graphs(
    (4, 6),
    modules=lambda: {"v": nn.ParameterList([_param(2), _param(1, 2), _param(1), _param(2)])},
)
def vectors_of_unlike_shapes(m, x):
    parts = [x[:, :2], x[:, 2:4], x[:, 4:], x[:, 1:3]]
    return torch.stack([torch.sigmoid(p * v) for p, v in zip(parts, m.v)], 1)


@graphs((4, 6), modules=lambda: {"v": nn.ParameterList([_param(2), _param(2), _param(2)])})
def vectors_frozen_and_repeated(m, x):
    m.v[1].requires_grad_(False) if not torch.compiler.is_compiling() else None
    a, b, c = x.split(2, 1)
    return torch.cat([a * m.v[0], b * m.v[0], c * m.v[2]], 1), torch.cat(
        [a + m.v[2], b + m.v[2]], 1
    )


@graphs((4, 6), modes="train symbolic")
def numbers_that_differ_in_type(m, x):
    a, b, c = x.split(2, 1)
    return (
        torch.cat([a * 2, b * 2.0, c * True], 1),
        torch.cat([a + 1, b + 1.0, c + True], 1),
        torch.cat([a**2, b**2.0, c**3], 1),
        torch.cat([a.clamp(0, 1), b.clamp(0.0, 1.0), c.clamp(False, True)], 1),
        torch.cat([a * 0.1, b * (1 / 10), c * 0.10000000000000002], 1),
    )


@graphs(INTS, modes="train")
def integers_and_numbers(m, x):
    a, b, c = x.split(2, 1)
    return [
        a * 2, b * 2.0, c * True, a + 0.5, b + 1, a**2, b**2.0, c.abs() ** 0.5, a & 3, b | 1,
        c ^ 2, a << 1, b >> 1, -c, ~a, a.float() * 2, torch.cat([a, b.float()], 1),
        torch.cat([a, c], 1) / 2, [p.clamp(0, 5) for p in (a, b, c)],
        [torch.relu(p) for p in (a, b, c)], [p.clamp(0.5) for p in (a, b)],
        torch.stack([a, b]).sum(0), [p.cumsum(1) for p in (a, b, c)],
    ]  # fmt: skip


@graphs(INTS.to(torch.uint8), INTS.bool(), INTS.to(torch.int16), modes="train")
def small_types(m, u, f, s):
    a, b = u.split(3, 1)
    c, d = f.split(3, 1)
    e, g = s.split(3, 1)
    return [
        a - 1, b - 1, -a, a + e, b + g, a * c, b * d, c + d, d * c, c & d, c | d, ~d, c ^ d,
        c == d, a // 2, a % 3, torch.cat([a, e], 1), torch.cat([c, e], 1),
        torch.stack([c, d]).any(1), [p.sum(1) for p in (a, b)], [p.sum() for p in (c, d)],
        [p.prod(1) for p in (e, g)], torch.where(c, a, b), torch.where(d, b, a), a * 300, b + 255,
        [p.all(1) for p in (c, d)], [p.to(torch.int8) for p in (a, b)],
        [torch.abs(p) for p in (e, g)],
    ]  # fmt: skip


@graphs(
    (4, 6),
    torch.randn(4, 6, dtype=torch.float64),
    torch.randn(4, 6).half(),
    coarse=True,
    modes="train",
)
def cats_that_promote(m, x, y, z):
    a, b = x.split(3, 1)
    c, d = y.split(3, 1)
    e, f = z.split(3, 1)
    return [
        torch.cat([a, c], 1), torch.cat([a, e], 1), torch.cat([e, f], 1), torch.cat([c, d, a], 1),
        torch.stack([a.double(), c]), torch.cat([a, b], 1).to(torch.float64).split(3, 1)[0],
        torch.cat([e, a], 1).split(3, 1)[0], torch.cat([a, c], 1).split(3, 1)[0],
        torch.hstack([a, c]), torch.cat([a.int(), c], 1), torch.cat([e.bfloat16(), f], 1),
    ]  # fmt: skip


@graphs(BASE[:, :6], BASE[:, 3:9], BASE[1:, 2:4], modes="train again")
def inputs_that_overlap(m, x, y, z):
    return (
        torch.cat([x, y], 1),
        torch.cat([x[:, 3:], y[:, :3]], 1),
        torch.cat([x[1:, 2:4], z], 0),
        y + 1,
    )


@graphs(BASE.clone()[:, :6], modes="train")
def only_view_of_its_base(m, x):
    a, b = x.split(3, 1)
    return torch.cat([a, b], 1), torch.cat([b, a], 1) * 1, x[:, :3]


def _halves():
    base = torch.randn(4, 12)
    return base[:, :6], base[:, 6:]


@graphs(*_halves(), modes="train again")
def one_of_two_views_written(m, x, y):
    a = torch.cat([x, y], 1)
    x.mul_(2)
    b = torch.cat([x, y], 1)
    return a, b, [p.tanh() for p in (x, y)]


WHOLE = torch.randn(4, 6)


@graphs(WHOLE, WHOLE.view(24), WHOLE.t(), modes="train again")
def three_views_of_one_written(m, x, flat, columns):
    before = [p.exp() for p in x.split(2, 1)]
    flat[:5].zero_()
    after = [p.exp() for p in x.split(2, 1)]
    columns[0] += 1
    return before, after, torch.cat([x.split(3, 1)[0], x.split(3, 1)[1]], 1), columns.sum(0)


@graphs(WHOLE.clone().requires_grad_(), modes="train")
def one_input_given_twice(m, x):
    y = x
    return torch.cat([x, y], 1), torch.stack([x.relu(), y.relu()]), x * y


@graphs(
    torch.randn(1, 6).expand(4, 6), torch.randn(4, 1).expand(4, 6), torch.randn(()).expand(4, 6)
)
def expanded_inputs(m, x, y, z):
    return [
        torch.cat([x, y, z], 1), [p.relu() for p in x.split(2, 1)],
        [p.sum(1) for p in y.split(2, 1)], torch.cat(z.split(3, 1), 1),
        torch.stack(z.unbind(1), 0), torch.stack(x.unbind(0), 0), x.view(4, 2, 3),
        torch.cat(y.split(2, 1), 1).view(8, 3), z.contiguous() + x, x.clone(), y.clone(),
    ]  # fmt: skip


@graphs((4, 1, 6), modes="train symbolic")
def sizes_of_one(m, x):
    y = x.squeeze(1)
    return [
        torch.cat([x, x * 2], 1), x.unbind(1)[0], x.split(1, 1)[0] + 1,
        torch.stack([y]).squeeze(0), x.expand(-1, 3, -1).unbind(1), x.transpose(0, 1)[0],
        torch.cat([y[:, :1], y[:, 1:2]], 1), x.squeeze(), x[:, 0], x[:, -1], x.flatten(0, 1),
        x.view(-1, 6), y.unsqueeze(1).squeeze(1).relu(), [p.softmax(1) for p in y.split(1, 1)],
        [F.layer_norm(p, (1,)) for p in y.split(1, 1)], [p.mean(1) for p in y.split(1, 1)],
        [F.normalize(p) for p in y.split(1, 1)],
    ]  # fmt: skip


@graphs(torch.randn(()), torch.randn(()), torch.randn((), dtype=torch.float64), modes="train")
def scalars_only(m, x, y, z):
    return [
        torch.stack([x, y]), torch.stack([x, y]).unbind(), torch.stack([x.exp(), y.exp()]),
        x.unsqueeze(0), torch.cat([x[None], y[None]]), x * z, y * 2, x.reshape(1, 1), x.expand(3),
        torch.stack([x, y]).sum(), x.flatten(), torch.atleast_1d(x), x.sum(), x.softmax(0),
        torch.hstack([x, y]), torch.vstack([x, y]), torch.dstack([x, y]),
        torch.column_stack([x, y]), torch.stack([x, y])[0], torch.stack([x, y])[1:].tanh(),
        x.view([]), x.view(()).relu(),
    ]  # fmt: skip


@graphs(torch.randn(0, 6), torch.randn(4, 0), torch.randn(0), modes="train")
def nothing_in_them(m, x, y, z):
    return [
        torch.cat([x, x]), torch.cat([y, torch.ones(4, 2)], 1), torch.cat([z, torch.ones(3)]),
        torch.cat([z, torch.ones(2, 3)], 0), [p.relu() for p in x.split(2, 1)],
        torch.cat(x.split(3, 1), 1), torch.stack(x.unbind(1)), [p.sum(1) for p in x.split(2, 1)],
        [p.sum(0) for p in x.split(2, 1)], y.sum(1), y.split([0, 0], 1), y @ torch.ones(0, 3),
        x @ torch.ones(6, 2), torch.stack([y, y]), y.view(4, 0, 3), F.linear(x, torch.ones(2, 6)),
        x.mean(1), y.softmax(1), torch.cat([y, y], 0).split(4)[1], x.chunk(3, 0),
        [F.layer_norm(p, (2,)) for p in x.split(2, 1)], x.flip(0), y.view(-1), F.normalize(y),
    ]  # fmt: skip


@graphs((4, 6), modules=lambda: {"w": _param(6, 0), "b": _param(0), "v": _param(0, 6)})
def linears_of_no_width(m, x):
    a = F.linear(x, m.v, m.b)
    return a, x @ m.w, a @ m.w.t(), F.linear(a, m.w), F.linear(a, m.w) + F.linear(x, torch.eye(6))


NAN, INF = float("nan"), float("inf")


@graphs(torch.tensor([[NAN, 1.0, INF, 0.0, -INF, 2.0]] * 4), (4, 6), modes="train")
def zero_times_infinity(m, x, y):
    a, b, c = x.split(2, 1)
    d, e, f = y.split(2, 1)
    return [
        torch.cat([a * 0, b * 0, c * 0], 1), torch.cat([a * d, b * e, c * f], 1), x * 0.0 + y,
        [p.sum() for p in (a, b, c)], [p.amax(1) for p in (a, b, c)],
        [p.mean(0) for p in (a, b, c)], torch.where(x.isfinite(), x, 0.0) * y, torch.nan_to_num(x),
        x.clamp(0, 1), x.relu(), x.tanh(), [F.softmax(p, 1) for p in (a, b, c)],
        [torch.maximum(p, q) for p, q in zip((a, b), (d, e))], a.isnan(), b.isnan(), (a == a),
        (b == b), x.cumsum(1), F.gelu(x), F.silu(x), x.sigmoid(),
    ]  # fmt: skip


@graphs(torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 2.0]] * 4, requires_grad=True), modes="train")
def gradients_at_corners(m, x):
    a, b, c = x.split(2, 1)
    return [
        [p.relu() for p in (a, b, c)], [p.abs() for p in (a, b, c)],
        [p.clamp(0, 1) for p in (a, b, c)], [p.amax(1) for p in (a, b, c)],
        [F.normalize(p, dim=1) for p in (a, b, c)], [torch.maximum(a, b), torch.maximum(b, c)],
        [p.norm(dim=1) for p in (a, b, c)], [p.sign() for p in (a, b)],
        [F.relu6(p) for p in (a, b)], [F.hardtanh(p) for p in (b, c)], [p.sqrt() for p in (a, b)],
        [p.prod(1) for p in (a, b, c)],
    ]  # fmt: skip


@graphs((4, 6), modes="train")
def results_of_one_kind_in_unlike_places(m, x):
    a, b, c = x.unsqueeze(2).split(2, 1)
    d = [p.transpose(1, 2) for p in (a, b, c)]
    return (
        [p.softmax(2) for p in d],
        [p.softmax(1) for p in d],
        torch.cat([d[0], d[2]], 2),
        torch.cat([d[0].mT, d[1].mT, d[2].mT], 1),
        torch.stack([p.sum(1) for p in d], 1),
    )


@graphs((4, 6), torch.tensor([0, 2, 1, 1]), modes="train aot")
def indices_from_a_tensor(m, x, i):
    return [
        x[i], x.index_select(0, i), torch.gather(x, 1, i[:, None]), x[:, i], x[torch.arange(4), i],
        [p[i] for p in x.split(2, 1)], F.one_hot(i, 3), x.take(i), x.scatter(1, i[:, None], 9.0),
        x.index_add(0, i, x), F.embedding(i, x), x[i > 0].sum(0), x[i, 1:3],
        torch.cat([x[i, :3], x[i, 3:]], 1),
    ]  # fmt: skip
