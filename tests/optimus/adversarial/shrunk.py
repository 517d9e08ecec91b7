"""What random programs were shrunk to that misled a rewriter, a graph for each kind of fault."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()


def _linears(count, *sizes):
    return {"l": nn.ModuleList(nn.Linear(*sizes) for _ in range(count))}


# Calls on several tensors at once.


@graphs((4, 6), modules=lambda: _linears(6, 6, 3), modes="train aot")
def some_results_of_one_call(m, x):
    a, b, c, d, e, f = (layer(x) for layer in m.l)
    added = torch._foreach_add([a, b], 1.0)
    multiplied = torch._foreach_mul([c, d], [d, c])
    wide = torch.broadcast_tensors(e, f)
    return added[1], multiplied[0], wide[-1]


@graphs((4, 6), modules=lambda: _linears(4, 6, 3), modes="train aot")
def written_at_once(m, x):
    a, b, c, d = (layer(x) for layer in m.l)
    torch._foreach_add_([a, b], [c, d])
    torch._foreach_mul_([c, b], 0.5)
    e, f = torch.stack([a, b]).tanh().unbind()
    return e, f.detach(), torch.relu(a)


@graphs((4, 6), modes="train aot")
def parts_of_one_of_several_results(m, x):
    a, b = torch._foreach_add([x, x], 1.0)
    largest, _ = (x * 2).view(4, 3, 2).max(2)
    for y in (b, largest):
        y.narrow(1, 0, 1).copy_(y.narrow(1, 2, 1))
    return a, torch.relu(b), largest[:, 1:].tanh(), largest[:, :1]


# Tensors that become other views of their memory.


@graphs((4, 6), modes="train aot")
def tensors_turned_in_place(m, x):
    y = x * 2
    parts = y.tensor_split(6, 1)
    a, b, c = parts[:3]
    d = torch.cat([p.softmax(1) for p in (a, b, c)], 1)
    b.squeeze_()
    c.t_()
    e = x + 1
    f = torch.stack([p.relu() for p in e.split(2, 1)])
    e.unsqueeze_(0)
    return d, f, b, c.tanh(), e, parts[3:]


# Numbers that the caller gives.


@graphs((4, 6), 3, modules=lambda: _linears(2, 6, 3), modes="dynamic symbolic train")
def expanded_as_often_as_said(m, x, n):
    return [layer(x).unsqueeze(-1).expand(*x.shape[:1], 3, n - 3) for layer in m.l]


# Memory: its layout, and the tensors that stand for it.


@graphs(torch.randn(6, 5), modes="train aot", modules=lambda: {"w": nn.Parameter(torch.rand(8, 4))})
def rows_picked_by_what_was_laid_out_anew(m, x):
    index = (torch.stack(x.unbind(1)) * 2).long().clamp(0, 7)
    a = F.batch_norm(torch.stack(x.unbind(1)), torch.zeros(6), torch.ones(6))
    return m.w[index], m.w[:, index % 4], index + 0, a


@graphs(torch.zeros(0, 6), modes="train no_grad")
def parts_of_what_is_written_to(m, x):
    torch.cat([x[:1], x[1:]], out=x)
    y = x * 2
    torch.add(y[:1], y[1:], out=y)
    return x.split(3, 1), y + 1


@graphs((4, 6), modes="train empty")
def parts_of_what_the_graph_writes_to(m, x):
    with torch.no_grad():
        y = torch.add(x, x, out=torch.zeros_like(x))
        z = torch.relu(y)
        if not len(x):
            torch.cat([y[:1], y[1:]], out=y)
    out = torch.zeros_like(x.detach())
    same = torch.add(x.detach(), 1, out=out)
    column = same.unsqueeze(1)
    if not len(x):
        torch.cat([out[:1], out[1:]], out=same)
    return z, column


@graphs((4, 6), modules=lambda: _linears(2, 6, 3), modes="train empty")
def dropped_out_of_nothing(m, x):
    return [F.dropout(layer(x), 0.5, training=not len(x)) for layer in m.l]


@graphs((4, 6), modules=lambda: _linears(4, 6, 6), modes="train aot")
def what_is_written_from_values_laid_out_anew(m, x):
    a, b, c, d = (layer(x) for layer in m.l)
    e, f = m.l[0](a), m.l[0](b)
    with torch.no_grad():
        out = torch.zeros_like(f)
        g = torch.add(f, f, out=out)
    h = x * 2
    i = h.add_(d.t()[:4].sum() + d)
    return e, f, g, out, c, h, i


@graphs((4, 6), 3, modules=lambda: _linears(3, 6, 1), modes="train symbolic")
def what_was_replaced_is_written_to_and_given_back(m, x, n):
    a, b, c = (x @ layer.weight.t() for layer in m.l)
    d, e = a.fill_(n), b.fill_(0)
    c.fill_(n)
    return e.to(x.dtype), e, d.reshape(-1, 1)


@graphs((4, 6), modules=lambda: _linears(3, 6, 3), modes="train aot")
def what_no_grad_writes_to_and_gives_back(m, x):
    a, b, c = (layer(x) for layer in m.l)
    d, e = (F.batch_norm(y, None, None, training=True) for y in (a, b))
    with torch.no_grad():
        f = d.add_(c)
        g = torch.add(e, c, out=e)
    return f, g


@graphs((4, 6), modes="train aot")
def equal_parts_that_are_returned_apart(m, x):
    y = x * 2
    first, second = torch.split(y, 2, 1), torch.split(y, 2, 1)
    third = torch.split(torch.split(y, [2, 4], 1)[0], [2], 1)[0]
    return first[0], second[0], third, y.flatten().ravel()


@graphs((4, 6), modules=lambda: _linears(1, 2, 1), modes="train aot")
def a_stack_written_to_a_place_and_mixed(m, x):
    given = x.detach()[:, :2]
    out = torch.zeros_like(given)
    parts = torch.stack([given[..., 0], given[..., 0]], -1, out=out[..., :2])
    return F.linear(parts, m.l[0].weight)


@graphs((4, 6), modules=lambda: _linears(6, 6, 3), modes="train aot")
def what_only_says_a_type_or_shape(m, x):
    a, b, c, d, e, f = (layer(x) for layer in m.l)
    return a.to(b).sin(), c.type_as(d).cos(), e.reshape_as(f).tanh()


# What is detached and written to with gradients.


@graphs((4, 6), (4, 6), modes="train aot")
def written_behind_a_detach(m, x, y):
    a, b = x.detach(), (x * 2).detach()
    a.masked_scatter_(a > 0, y)
    b.mul_(y)
    return torch.relu(a), torch.relu(b)


@graphs((4, 6), (4, 6), modes="train aot")
def detached_twice_and_each_written_to(m, x, y):
    z = x * 2
    a, b = z.detach(), z.detach()
    a.mul_(x)
    b[:2].mul_(y[:2])
    return torch.relu(a), torch.relu(b), z + 1


@graphs((4, 6), modules=lambda: _linears(6, 6, 6), modes="train aot")
def only_what_is_written_has_a_gradient(m, x):
    a, b, c, d, e, f = (layer(x) for layer in m.l)
    a, b = a.detach(), torch.zeros_like(b)
    a.masked_scatter_(a > 0, c)
    b.masked_scatter_(x > 0, d)
    return a.tanh(), b.tanh(), e.tanh(), f.detach().mul_(e).tanh()


@graphs((4, 6), modules=lambda: _linears(4, 6, 6), modes="train aot")
def what_is_written_behind_a_detach_is_read_in_front_of_it(m, x):
    a, b, c, d = (layer(x) for layer in m.l)
    e, f = a.detach(), b.detach()
    e.mul_(c)
    f.view(-1).masked_fill_(f.view(-1) > 0, 1.0)
    return b.detach().tanh(), d.tanh(), (x * 2).add_(e.detach())


@graphs((4, 8), modules=lambda: _linears(4, 8, 4), modes="eval train aot")
def parts_of_what_drops_nothing(m, x):
    a, b, c, d = (layer(x) for layer in m.l)
    e, f = F.dropout(a, 0.5, m.training), F.dropout(b, 0.5, m.training)
    g, h = F.alpha_dropout(c + 1, 0.0), F.alpha_dropout(d + 1, 0.0)
    return e[:, 2:], f, g[:, 1:], h


@graphs((4, 8), modules=lambda: _linears(6, 8, 4), modes="train eval empty")
def dropped_under_no_grad(m, x):
    a, b, c, d, e, f = (layer(x) for layer in m.l)
    with torch.no_grad():
        g, h, i, j = (F.dropout(v, 0.5, m.training) for v in (a, b, c, d))
    return g, i.tanh(), F.alpha_dropout(e, 0.0), f.tanh() + j.detach() + h.shape[0]


@graphs((4, 8), modules=lambda: _linears(2, 8, 4), modes="train aot")
def parts_put_into_new_memory(m, x):
    a, b = (layer(x) for layer in m.l)
    c, d = a.split(2, 1)
    e, f = c.new_zeros(4, 4), torch.zeros_like(d)
    e[:, :2] = c
    e[:, 2:] = d
    f.masked_scatter_(c > 0, d)
    return torch.relu(a), torch.relu(b), e.tanh(), f.tanh()


@graphs(
    (4, 8),
    torch.randn(4, 8),
    modules=lambda: {"u": torch.randn(4, 8), "v": torch.randn(4, 8)},
    modes="train aot",
)
def read_before_it_gets_a_gradient(m, x, y):
    a, b = F.linear(y, m.u), F.linear(y, m.v)
    c, d = a.split(2, 1)
    t = y[:, :2] * 2
    r = torch.add(t, c)
    s = r.narrow(1, 0, 1) + d[:, 1:]
    t.masked_scatter_(t > 0, x)
    return r, t.tanh(), torch.relu(a), torch.relu(b), s


@graphs(
    (4, 8),
    modules=lambda: _linears(2, 8, 4, False) | {"c": nn.Linear(4, 4, bias=False)},
    modes="train aot",
)
def kernel_on_a_part_that_is_copied_later(m, x):
    a, b = (layer(x) for layer in m.l)
    return b * m.c(b) + b, a, b


@graphs((4, 8), modes="eval train")
def joined_alone_behind_a_dropout(m, x):
    a, b = (F.dropout(part, 0.5, m.training) for part in x[:, 1:].split([4, 3], 1))
    c, d = torch.cat([a, b], 1).split([4, 3], 1)
    (e,) = torch.stack([a.tanh(), b.sin()[:, :1].expand(-1, 4)]).unbind()[:1]
    return torch.cat([a], 1), c, d[:, 1:], e


@graphs(
    torch.rand(4, 2, dtype=torch.float64), modules=lambda: {"w": nn.Parameter(torch.rand(1, 4))}
)
def einsum_of_two_types(m, x):
    return [torch.einsum("...i,ij->...j", part, m.w) for part in x.split(1, 1)]


@graphs(
    (3, 4),
    modules=lambda: {"b": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))},
    modes="eval train",
)
def written_to_behind_a_dropout(m, x):
    a, b, c = (F.dropout(m.b(part), 0.3, m.training) for part in x.unbind())
    c += b
    return a, b + 1, c * 1, torch.stack(x.unbind(), 1)
