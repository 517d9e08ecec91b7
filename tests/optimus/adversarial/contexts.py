"""Graphs with regions, hooks, control flow, custom operators and unusual structure."""

# ruff: noqa: RUF059 (names as a user gives them)

from __future__ import annotations

from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()
Pair = namedtuple("Pair", "left right")


def _linears(count, *sizes):
    return nn.ModuleList(nn.Linear(*sizes) for _ in range(count))


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


@graphs((4, 6))
def hook_on_one_of_two_twins(m, x):
    a, b = x * 2, x * 2
    if a.requires_grad:
        a.register_hook(lambda g: g * 10)
    return a + b.exp()


@graphs((4, 6))
def hook_on_one_branch(m, x):
    a, b, c = (torch.tanh(p) for p in x.split(2, 1))
    b.register_hook(lambda g: g * 10)
    return torch.cat([a, b, c], 1)


@graphs((4, 6))
def hook_on_a_noop(m, x):
    y = x * 3
    a = y.view(4, 6) if y.shape[0] == 4 else y.view_as(y)
    a.register_hook(lambda g: g + 1)
    return a.exp() + y


@graphs((4, 6))
def own_gradients(m, x):
    parts = [_Double.apply(p) for p in x.split(2, 1)]
    return (
        torch.cat(parts, 1),
        _Double.apply(x) + _Double.apply(x),
        [_Straight.apply(p) for p in parts],
    )


@graphs((4, 6))
def straight_through_by_detach(m, x):
    parts = x.split(2, 1)
    return torch.cat([p + (p.round() - p).detach() for p in parts], 1), x - x.detach()


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)})
def checkpointed_branches(m, x):
    parts = x.split(2, 1)
    a = [
        checkpoint(lambda p, i=i: torch.tanh(m.l[i](p)), p, use_reentrant=False)
        for i, p in enumerate(parts)
    ]
    return torch.cat(a, 1), [m.l[i](p) for i, p in enumerate(parts)]


@graphs((4, 6), modules=lambda: {"d": nn.Dropout(0.5)})
def checkpointed_dropout(m, x):
    a = checkpoint(lambda p: m.d(p).relu(), x, use_reentrant=False)
    return a, m.d(x), torch.rand(3)


@graphs((4, 6), torch.tensor(True))
def conditional(m, x, flag):
    a, b = x.split(3, 1)
    y = torch.cond(flag, lambda u, v: u.sin() + v, lambda u, v: u.cos() - v, (a.clone(), b * 1))
    return torch.cat([y, a], 1), a.sin(), b.sin()


@graphs(torch.arange(24.0).view(4, 6), modes="train")
def loop_in_the_graph(m, x):
    from torch._higher_order_ops.while_loop import while_loop

    n, y = while_loop(
        lambda i, v: i < 3, lambda i, v: (i + 1, v * 2 + 1), (torch.tensor(0), x[:, :3].clone())
    )
    return torch.cat([y, x[:, 3:]], 1), n


@graphs((4, 6), modules=lambda: {"l": _linears(2, 3, 3)})
def broken_in_the_middle(m, x):
    a, b = (lin(p) for lin, p in zip(m.l, x.split(3, 1), strict=True))
    torch._dynamo.graph_break()
    c, d = a.relu(), b.relu()
    a = a + 1
    torch._dynamo.graph_break()
    return torch.cat([c, d], 1), a, torch.cat([a, b], 1)


@graphs(torch.arange(24.0).view(4, 6))
def broken_between_writes(m, x):
    y = x * 2
    v = y[:, :3]
    v.add_(1)
    torch._dynamo.graph_break()
    v.mul_(2)
    return y, torch.cat([y[:, :3], y[:, 3:]], 1)


@graphs((4, 6), modules=lambda: {"l": nn.Linear(2, 2)})
def nested_outputs(m, x):
    a, b, c = (m.l(p) for p in x.split(2, 1))
    return {
        "one": [a, (b, None)],
        "two": Pair(c, 3),
        "three": {"x": a, "n": x.shape[1], "s": "text"},
    }


@graphs((4, 6), modes="train")
def inference_mode_inside(m, x):
    with torch.inference_mode():
        y = x.detach().clone()
        z = torch.cat([p.tanh() for p in y.split(2, 1)], 1).sum()
    return x * 2, torch.cat([p.tanh() for p in x.split(2, 1)], 1), z.shape


@graphs((4, 6))
def grad_mode_switched_by_hand(m, x):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    a = [p.exp() for p in x.split(2, 1)]
    torch.set_grad_enabled(before)
    b = [p.exp() for p in x.split(2, 1)]
    return a, b, torch.cat([a[0], b[1], a[2]], 1)


@graphs((4, 6))
def twins_in_unlike_modes(m, x):
    with torch.no_grad():
        a = x.exp()
        v = x.view(-1)
    b = x.exp()
    w = x.view(-1)
    return a * b, v + w, torch.cat([v, w])


@graphs((4, 6), modules=lambda: {"l": _linears(3, 6, 2)})
def gradient_inside_the_graph(m, x):
    def loss(p):
        return sum(F.linear(p, lin.weight).tanh().sum() for lin in m.l)

    return torch.func.grad(loss)(x.detach()), [lin(x) for lin in m.l]


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)})
def vectorized(m, x):
    f = lambda row: torch.cat([lin(p) for lin, p in zip(m.l, row.split(2), strict=True)])  # noqa: E731
    return torch.vmap(f)(x), torch.vmap(lambda a: a.split(3)[0] * a.split(3)[1])(x)


@graphs((4, 6))
def cross_dependent_groups(m, x):
    a, b, c = x.split(2, 1)
    p = a.tanh()
    q = (b * p).sigmoid()
    r = (c * q).tanh()
    s = p.sigmoid()
    t = q.tanh()
    return torch.cat([p, t, r], 1), torch.cat([q, s, r.sigmoid()], 1)


@graphs((4, 6), modules=lambda: {"a": _linears(2, 3, 3), "b": _linears(2, 3, 3)})
def two_groups_that_would_be_a_cycle(m, x):
    u, v = x.split(3, 1)
    a0 = m.a[0](u)
    b0 = m.b[0](v).relu()
    a1 = m.a[1](b0)
    b1 = m.b[1](a0.relu())
    return a0 + b1, a1 * b0


@graphs((4, 6), modules=lambda: {"l": nn.Linear(6, 6)})
def one_module_many_times(m, x):
    for _ in range(6):
        x = m.l(x).relu() + x
    return x, m.l(x), m.l(x * 2)


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)})
def members_that_feed_each_other(m, x):
    a, b, c = x.split(2, 1)
    y = m.l[0](a)
    z = m.l[1](b + y)
    return y, z, m.l[2](c), torch.stack([y, z]), torch.cat([z, y], 1)


@graphs((4, 6))
def pieces_out_of_order_and_twice(m, x):
    a, b, c = x.split(2, 1)
    d, e, f = (x * 2).split(2, 1)
    return (
        torch.cat([a, c, b], 1), torch.cat([a, a, b], 1), torch.cat([a, e, c], 1),
        torch.cat([b, c, a], 1), torch.cat([a, x[:, :1], b, c], 1), torch.stack([a, e, c]),
        torch.cat([a, b, c], 0), torch.stack([c, b, a], 1), torch.cat([d, e], -1),
    )  # fmt: skip


@graphs((4, 2, 6))
def pieces_along_another_dimension(m, x):
    a, b = x.unbind(1)
    c, d = x.split(1, -2)
    return [
        torch.stack([a, b], -1), torch.cat([c, d], -1), torch.cat([c, d], 1), torch.cat([c, d], 0),
        torch.stack([a, b], -3), torch.stack([c, d], 1),
        torch.cat([a.unsqueeze(1), b[:, None]], -2),
        torch.hstack([a, b]), torch.vstack([c, d]), torch.dstack([c, d]),
        torch.column_stack([c, d]),
    ]  # fmt: skip


@graphs((4, 6))
def uneven_and_empty_pieces(m, x):
    a, b = x.split([6, 0], 1)
    c = x.split(4, 1)
    d = x.chunk(4, 1)
    e = x.tensor_split([1, 1, 9], 1)
    return (
        torch.cat([a, b], 1),
        torch.cat([b, a, b], 1),
        b,
        torch.cat(c, 1),
        torch.cat(d[::-1], 1),
        e,
        torch.cat([torch.empty(0), x, torch.empty(0)], 1),
    )


@graphs((4, 6))
def indices_of_every_kind(m, x):
    i = torch.tensor([2, 0])
    return [
        x[..., -2:], x[:, -1], x[-1], x[:, ::2], x[None, :, 1:3, None], x[:, i], x[i, i], x[:2, 1],
        x[:, -4:-1], x[:, 5:2], x[:, 2:100], x[True], x[torch.tensor(1)], x[..., 0][1:],
        x[x > 0].sum(),
        x.narrow(-1, -3, 2), x.select(-1, -2), x.index_select(1, i),
        x.take_along_dim(i[None, :], 1),
    ]  # fmt: skip


@graphs((4, 6))
def batch_is_cut(m, x):
    n = x.shape[0] // 2
    a, b = x[:n], x[n : 2 * n]
    return (
        a + b,
        torch.cat([a, b]),
        x.view(-1, 2, 3).transpose(0, 1).reshape(2, -1),
        x.sum() / x.size(0),
    )


@graphs((4, 6))
def einsums(m, x):
    y = x.view(-1, 2, 3)
    return [
        torch.einsum("ij,kj->ik", x, x), torch.einsum("bij,bkj->bik", y, y),
        torch.einsum("bij->bji", y),
        torch.einsum("bij,bij->b", y, y), torch.einsum("ij,jk->ki", x, x.t()),
        torch.einsum("bii->bi", y[:, :, :2]),
        torch.einsum("...i,ji->...j", y, torch.ones(5, 3)), torch.einsum("ij,j", x, x[0]),
        torch.einsum("bij,j", y, y[0, 0]),
        torch.einsum("bij,cij->bc", y, y), torch.einsum(x, [0, 1], x, [2, 1], [2, 0]),
        torch.einsum("ab,cb->", x, x),
    ]  # fmt: skip


@graphs((4, 2, 6))
def products_of_many_ranks(m, x):
    a, b = x[:, :, :3], x[:, :, 3:]
    return [
        a @ b.mT, b @ a.mT, a[0] @ b[0].t(), a @ b[0].t(), a[0] @ b.mT, a @ b[0, 0],
        b[0, 0] @ a.mT, a[:1] @ b.mT,
        a[None] @ b.mT, torch.matmul(a, b[:1].mT), torch.bmm(a, b.mT), (a @ b.mT)[:, :1] @ a,
        a[:, :0] @ b.mT,
    ]  # fmt: skip


@graphs((4, 2, 6), modes="train dynamic")
def attention(m, x):
    q, k, v = (p.unflatten(-1, (2, 1)).transpose(1, 2) for p in x.chunk(3, -1))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    b = F.scaled_dot_product_attention(k, q, v, dropout_p=0.0, scale=0.3)
    return a, b, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if m.training else 0.0)


@graphs(
    (4, 6),
    modules=lambda: {"w": nn.ParameterList(torch.randn(2, 2) for _ in range(60))},
    modes="train",
)
def many_branches(m, x):
    parts = x.split(2, 1) * 20
    return sum((torch.tanh(p @ w) for p, w in zip(parts, m.w, strict=True)), torch.zeros(()))


@graphs((4, 6), modes="train")
def long_chain_of_splits_and_joins(m, x):
    for i in range(40):
        a, b, c = x.split(2, 1)
        x = torch.cat([b, c, a] if i % 3 else [a, b, c], 1)
    return x


@graphs((4, 6))
def numbers_from_the_graph(m, x):
    n = x.shape[0]
    s = x.sum()
    return (
        x * n,
        x / n,
        x.view(n, 6) * s,
        torch.full((n, 2), n),
        torch.arange(n),
        x.expand(2, n, 6) * 1,
    )


@graphs(
    (4, 6),
    modules=lambda: {"c": torch.ones(6), "n": torch.zeros((), dtype=torch.long)},
    modes="train dynamic",
)
def counter_in_a_buffer(m, x):
    m.n += 1
    m.c[:3].add_(m.n)
    a = x * m.c
    m.n.add_(1)
    return a, x * m.c + m.n, m.n, m.c[3:]


@graphs((4, 6))
def unused_branches(m, x):
    a, b, c = x.split(2, 1)
    torch.cat([a, b], 1).exp()
    d = b.clone()
    d.add_(1)
    torch.rand(3)
    return a.relu(), torch.rand(2)


@graphs((4, 6))
def asserted(m, x):
    a, b, c = x.split(2, 1)
    torch._assert(a.shape == b.shape, "shapes")
    torch._check(x.shape[1] == 6)
    torch._assert_async((x.abs() < 100).all())
    return torch.cat([a, b, c], 1)


@graphs((4, 6), modes="train double")
def double_precision_constants(m, x):
    y = x.double() / 3
    return (
        torch.cat([p + 1e-9 for p in y.split(2, 1)], 1),
        [p.sum(1) for p in y.split(2, 1)],
        y.float(),
    )
