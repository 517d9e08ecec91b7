"""Graphs of linears, norms and kernels whose weights are shared, cut, odd or written to."""

# ruff: noqa: B905 (of unequal lengths on purpose)

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()


def _param(*shape):
    return nn.Parameter(torch.randn(*shape))


def _linears(count, *sizes, bias=True):
    return nn.ModuleList(nn.Linear(*sizes, bias=bias) for _ in range(count))


@graphs((4, 6), modules=lambda: {"a": _param(3, 2, 6), "b": _param(3, 2, 6)})
def weights_at_a_place_of_stacks(m, x):
    return F.linear(x, m.a[2]), F.linear(x, m.b[2])


@graphs((4, 6), modules=lambda: {"a": _param(3, 2, 6), "b": _param(3, 2, 6)})
def weights_that_are_flattened(m, x):
    return F.linear(x, m.a.flatten(0, 1)), F.linear(x, m.b.flatten(0, 1))


@graphs((4, 6), modules=lambda: {"a": _param(3, 2, 6), "b": _param(6, 2), "c": _param(2, 6)})
def weights_got_in_unlike_ways(m, x):
    return F.linear(x, m.a[2]), F.linear(x, m.b.t()), x @ m.c.t(), F.linear(x, m.a[0]), x @ m.b


@graphs((4, 6), (4, 6), modules=lambda: {"w": _param(6, 6), "b": _param(6)})
def one_square_weight_both_ways(m, x, y):
    return F.linear(x, m.w), F.linear(y, m.w.t()), x @ m.w, y @ m.w.t() + m.b, F.linear(x, m.w, m.b)


@graphs((4, 6), modules=lambda: {"l": nn.Linear(6, 6)})
def tied_transposed_autoencoder(m, x):
    h = m.l(x).relu()
    return F.linear(h, m.l.weight.t()), m.l.weight * 2, m.l.weight.sum(0) + x


@graphs((4, 6), modules=lambda: {"w": _param(4, 6)})
def parameter_as_activation(m, x):
    parts = [F.relu(p) for p in m.w.split(2, 1)]
    return torch.cat(parts, 1), F.linear(x, m.w), F.linear(m.w, m.w), m.w @ x.t()


def _frozen(count, *sizes):
    layers = _linears(count, *sizes)
    layers[0].weight.requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    layers[2].requires_grad_(False)
    return layers


@graphs((4, 6), modules=lambda: {"l": _frozen(5, 6, 3)})
def partly_frozen_shared_input(m, x):
    return [lin(x) for lin in m.l]


@graphs((4, 15), modules=lambda: {"l": _frozen(5, 3, 3)})
def partly_frozen_towers(m, x):
    return [lin(p).relu() for lin, p in zip(m.l, x.split(3, 1), strict=True)]


@graphs((4, 6), modules=lambda: {"l": _linears(4, 6, 3)})
def some_branches_get_no_gradient(m, x):
    a, b, c, d = (lin(x) for lin in m.l)
    return a, b.detach(), (c > 0), d * 0


@graphs((4, 6), modules=lambda: {"l": _linears(4, 2, 2)})
def some_towers_under_no_grad(m, x):
    a, b, c = x.split(2, 1)
    with torch.no_grad():
        u = m.l[0](a)
    v = m.l[1](b)
    with torch.no_grad():
        w = m.l[2](c)
        with torch.enable_grad():
            z = m.l[3](c)
    return u, v, w, z, u + v


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)})
def nested_autocast(m, x):
    a, b, c = x.split(2, 1)
    with torch.autocast("cpu", torch.bfloat16):
        u = m.l[0](a)
        with torch.autocast("cpu", enabled=False):
            v = m.l[1](b)
        w = m.l[2](c)
    with torch.autocast("cpu", torch.float16):
        z = m.l[2](c)
    return u, v, w, z, m.l[0](a)


@graphs((4, 6), modules=lambda: {"l": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])})
def double_under_autocast(m, x):
    a, b, c = x.split(2, 1)
    with torch.autocast("cpu", torch.bfloat16):
        y = m.l[1](b.double())
        return m.l[0](a), y, m.l[1](c.double()), m.l[1].weight[:1] @ b.double().t(), F.softmax(a, 1)


@graphs(
    (4, 6),
    modules=lambda: {"w": _param(3, 6), "b": _param(1), "c": _param(4, 3), "d": _param(3, 3)},
    modes="train dynamic aot",
)
def biases_that_broadcast(m, x):
    h = F.relu(F.linear(x, m.w, m.b))
    return F.linear(h, m.d, m.b), F.linear(x, m.w, m.b), x * F.linear(h, m.w.t(), m.b) + x


@graphs(
    (4, 3),
    modules=lambda: {"w": _param(3, 3), "b": _param(1), "r": _param(1, 3)},
    modes="train dynamic aot",
)
def cross_layers_that_broadcast(m, x):
    a = x * F.linear(x, m.w, m.b) + x
    b = a * (F.linear(a, m.w) + m.b) + a
    c = b * (F.linear(b, m.w) + m.r) + b
    return (
        a,
        x[:1] * F.linear(c, m.w) + c,
        c * F.linear(c, m.w) + c[:1],
        c * F.linear(c[:, :3], m.w) - c,
    )


@graphs((4, 3), modules=lambda: {"w": _linears(3, 3, 3)})
def cross_layers_in_other_words(m, x):
    a = torch.addcmul(x, x, m.w[0](x))
    b = a + m.w[1](a) * x
    c = torch.add(b, x * m.w[2](b), alpha=1)
    d = c.addcmul(c, m.w[2](c), value=2)
    return a, b, c, d, torch.add(d, d * m.w[0](d), alpha=2)


@graphs((4, 3), modules=lambda: {"w": nn.Linear(3, 3)})
def cross_layer_of_itself(m, x):
    z = m.w(x)
    return z * z + z, x * z + z, x * m.w(x) + x, z


@graphs((4, 3), modules=lambda: {"w": nn.Linear(3, 3).bfloat16()}, coarse=True, modes="train")
def cross_layer_of_mixed_types(m, x):
    y = x.bfloat16()
    return x * m.w(y) + x, y * m.w(y) + x, x * m.w(y) + y, x.double() * m.w(y) + y


def _mlp(*layers):
    return nn.Sequential(*layers)


@graphs((4, 6), modules=lambda: {"a": nn.Linear(6, 6), "b": nn.Linear(6, 2)})
def mlp_with_one_weight_twice(m, x):
    return m.b(F.relu(m.a(F.relu(m.a(x))))), F.relu(
        F.linear(F.relu(F.linear(x, m.a.weight)), m.a.weight.t())
    )


@graphs(
    (4, 6),
    modules=lambda: {
        "a": _mlp(nn.Linear(6, 3), nn.ReLU(True), nn.Linear(3, 3), nn.ReLU(True), nn.Linear(3, 1)),
        "b": _mlp(
            nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)
        ),
        "c": _mlp(nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 3), nn.GELU("tanh"), nn.Linear(3, 2)),
        "d": _mlp(nn.Linear(6, 3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 3), nn.ReLU()),
        "e": _mlp(nn.Linear(6, 3), nn.LeakyReLU(0.3), nn.Linear(3, 3), nn.ReLU6(), nn.Linear(3, 3)),
    },
)
def mlps_of_many_kinds(m, x):
    return [f(x) for f in (m.a, m.b, m.c, m.d, m.e)]


@graphs((4, 6), modules=lambda: {"a": nn.Linear(6, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 2)})
def mlp_whose_hidden_layers_are_read(m, x):
    g = F.relu(m.a(x))
    h = F.relu(m.b(g))
    return m.c(h), m.c(F.relu(m.b(g.detach()))), h.detach() if m.training else g


@graphs((4, 2, 6), modules=lambda: {"a": _mlp(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))})
def mlp_on_three_dimensions(m, x):
    return m.a(x), m.a(x[:, 0]), m.a(x[0, 0]), m.a(x[:, :0]), m.a(x.transpose(0, 1))


def _pairs(rows, columns):
    return {"r": torch.tensor(rows), "c": torch.tensor(columns)}


def _dots(m, dense, embedded, dim=1):
    v = torch.cat([dense.unsqueeze(1), embedded], 1)
    z = torch.bmm(v, v.transpose(1, 2))
    return torch.cat([dense, z[:, m.r, m.c]], dim)


@graphs((4, 3), (4, 2, 3), modules=lambda: _pairs([1, -1, -1], [0, 0, -2]))
def dots_at_negative_places(m, dense, embedded):
    return _dots(m, dense, embedded)


@graphs((4, 3), (4, 2, 3), modules=lambda: _pairs([1], [0, 1, 2]))
def dots_at_broadcast_places(m, dense, embedded):
    return _dots(m, dense, embedded)


@graphs((4, 3), (4, 2, 3), modules=lambda: _pairs([0, 1, 1, 2, 2], [0, 1, 2, 1, 1]))
def dots_at_repeated_places_and_squares(m, dense, embedded):
    return _dots(m, dense, embedded)


@graphs(
    (4, 3),
    (4, 2, 3),
    modules=lambda: {"r": torch.zeros(0, dtype=torch.long), "c": torch.zeros(0, dtype=torch.long)},
)
def dots_at_no_place(m, dense, embedded):
    return _dots(m, dense, embedded)


@graphs(
    (4, 3),
    torch.randn(4, 2, 3),
    modules=lambda: _pairs([1, 2, 2], [0, 0, 1]),
    coarse=True,
    modes="train",
)
def dots_of_mixed_types(m, dense, embedded):
    return _dots(m, dense, embedded.bfloat16()), _dots(m, dense.double(), embedded.double())


@graphs(
    (4, 3),
    torch.randn(2, 4, 3).transpose(0, 1),
    modules=lambda: _pairs([1, 2], [0, 1]),
    modes="train",
)
def dots_of_strided_vectors(m, dense, embedded):
    return _dots(m, dense.relu(), embedded), _dots(m, dense, embedded[:, :, :])


def _norms(count, width, **options):
    return nn.ModuleList(nn.BatchNorm1d(width, **options) for _ in range(count))


@graphs((4, 6), modules=lambda: {"n": _norms(3, 2)}, modes="train eval")
def batch_norms(m, x):
    a = [n(p) for n, p in zip(m.n, x.split(2, 1), strict=True)]
    return a, m.n[0].running_mean + 0, m.n[0](a[1])


@graphs((4, 6), modules=lambda: {"n": _norms(3, 2, momentum=0.3, eps=0.1)}, modes="train eval")
def batch_norms_with_other_momentum(m, x):
    return [n(p) for n, p in zip(m.n, x.split(2, 1), strict=True)]


@graphs((4, 6), modules=lambda: {"n": _norms(3, 2, track_running_stats=False)}, modes="train eval")
def batch_norms_without_statistics(m, x):
    return [n(p) for n, p in zip(m.n, x.split(2, 1), strict=True)]


@graphs((4, 6), modules=lambda: {"s": torch.zeros(2, 2), "v": torch.ones(2, 2)}, modes="train")
def batch_norms_on_slices_of_one_buffer(m, x):
    a, b, c = x.split(2, 1)
    y = F.batch_norm(a, m.s[0], m.v[0], training=True)
    z = F.batch_norm(b, m.s[1], m.v[1], training=True)
    w = F.batch_norm(c, m.s[0], m.v[0], training=True)
    return y, z, w


@graphs((4, 6), modules=lambda: {"s": torch.zeros(3, 2), "v": torch.ones(3, 2)}, modes="train")
def batch_norm_scaled_by_statistics(m, x):
    a, b, c = x.split(2, 1)
    y = F.batch_norm(a, m.s[0], m.v[0], training=True)
    z = F.batch_norm(b, m.s[1], m.v[1], m.v[0], m.s[0], training=True)
    return y, z, F.batch_norm(c, m.s[2], m.v[2], m.v[0] + 1, training=True)


@graphs(
    (4, 2, 6),
    modules=lambda: {"n": _norms(3, 2), "i": nn.InstanceNorm1d(2, track_running_stats=True)},
    modes="train eval",
)
def norms_over_channels(m, x):
    return (
        [n(p) for n, p in zip(m.n, x.split(2, 2), strict=True)],
        [m.i(p) for p in x.split(2, 2)],
        F.group_norm(x, 2),
    )


@graphs((4, 6), modules=lambda: {"w": _param(6, 3)})
def weight_written_between_linears(m, x):
    y = x.detach() @ m.w.detach()
    with torch.no_grad():
        m.w.mul_(0.5)
    return y, x.detach() @ m.w.detach(), x @ m.w


@graphs((4, 6), modules=lambda: {"e": torch.zeros(2)}, modes="train no_grad")
def moving_average_in_a_buffer(m, x):
    for p in x.split(2, 1):
        m.e.mul_(0.9).add_(p.detach().mean(0), alpha=0.1)
        p.sub(m.e)
    return x[:, :2] - m.e, m.e.clone(), m.e.lerp_(torch.ones(2), 0.5) * x[:, 2:4]


def _gated(m, gates, experts, dim):
    return [(g.unsqueeze(-1) * torch.stack(e, dim)).sum(dim) for g, e in zip(gates, experts)]


@graphs((4, 12), (4, 6))
def mixtures_of_some_experts(m, x, gates):
    e = x.split(2, 1)
    return _gated(m, gates.softmax(1).split(3, 1), ([e[0], e[1], e[3]], [e[0], e[1], e[5]]), 1)


@graphs((4, 12), (4, 8))
def mixtures_with_repeated_and_reversed(m, x, gates):
    e = x.split(2, 1)
    chosen = ([e[0], e[1], e[0], e[1]], [e[3], e[2], e[1], e[0]])
    return _gated(m, gates.softmax(1).split(4, 1), chosen, 1)


@graphs((4, 12), torch.tensor([[float("nan"), 1.0, 2.0, 0.0] * 2] * 4), modes="train")
def mixtures_with_nan(m, x, gates):
    e = x.split(2, 1)
    chosen = ([e[0], e[1], e[3], e[4]], [e[0], e[1], e[4], e[5]])
    return _gated(m, gates.split(4, 1), chosen, 1)


@graphs((4, 12), (4, 8), coarse=True, modes="train")
def mixtures_with_dtype_and_kept_dimension(m, x, gates):
    e = x.bfloat16().split(2, 1)
    f, g = (p.unsqueeze(2) for p in gates.split(4, 1))
    s, t = torch.stack([e[0], e[1], e[3], e[4]], 1), torch.stack([e[0], e[1], e[4], e[5]], 1)
    return (
        (f * s).sum(1, keepdim=True),
        (t * g).sum(1, keepdim=True),
        (f * s).sum(1, dtype=torch.float64),
    )
