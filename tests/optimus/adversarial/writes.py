"""Graphs that write: through views, by out=, into inputs, buffers and parameters."""

# ruff: noqa: B905 (names as a user gives them)

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()
PLAIN = torch.arange(24.0).view(4, 6)


def _param(*shape):
    return nn.Parameter(torch.randn(*shape))


def _linears(count, *sizes):
    return nn.ModuleList(nn.Linear(*sizes) for _ in range(count))


@graphs(PLAIN, modes="train aot")
def results_into_given_memory(m, x):
    out = torch.empty(4, 6)
    torch.cat(x.split(3, 1), 1, out=out)
    a = [p + 0 for p in out.split(2, 1)]
    torch.add(x, 1, out=out)
    b = [p + 0 for p in out.split(2, 1)]
    torch.mul(out[:, :3], 2, out=out[:, :3])
    return a, b, out, torch.relu(out), torch.cat(out.split(3, 1), 1)


@graphs(PLAIN, modes="train")
def results_into_parts_of_memory(m, x):
    out = torch.zeros(4, 6)
    a, b, c = out.split(2, 1)
    torch.exp(x[:, :2] / 9, out=a)
    torch.sin(x[:, 2:4], out=b)
    torch.matmul(x[:, :4], torch.ones(4, 2), out=c)
    return out, a + b, torch.stack([a, b, c], 1)


@graphs(PLAIN, modes="train")
def stack_into_given_memory(m, x):
    out = torch.empty(3, 4, 2)
    y = torch.stack(x.split(2, 1), out=out)
    out[0] = 0
    return y * 1, [p.sum(1) for p in y.unbind()]


@graphs((4, 6), modes="train aot")
def columns_set_one_by_one(m, x):
    y = torch.zeros_like(x)
    for i in range(6):
        y[:, i] = x[:, 5 - i] * i
    return y, torch.stack(y.unbind(1), 1), torch.cat([y[:, :3], y[:, 3:]], 1)


@graphs((4, 6), modes="train aot")
def columns_gathered_by_index(m, x):
    y = x * 1
    y[:, torch.tensor([0, 2])] = x[:, [1, 3]]
    a = torch.cat(y.split(2, 1), 1)
    y[y > 0] = 0.5
    b = torch.cat(y.split(2, 1), 1)
    y[torch.tensor([0, 1]), torch.tensor([2, 3])] += 1
    return a, b, torch.cat(y.split(2, 1), 1)


@graphs((4, 6), modes="train")
def rows_copied_between_parts(m, x):
    y = x * 2
    a, b = y[:, :3], y[:, 3:]
    a.copy_(b)
    c = torch.cat([a, b], 1)
    b.copy_(x[:, :3])
    return c, torch.cat([a, b], 1), y * 1


@graphs((4, 6), modes="train")
def fills_and_zeros(m, x):
    y = x.tanh()
    z = [p.clone() for p in y.split(2, 1)]
    z[0].zero_()
    z[1].fill_(3)
    z[2].masked_fill_(z[2] > 0, -1)
    w = torch.cat(z, 1)
    w.clamp_(-1, 1)
    return w, z, [p.relu() for p in z]


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)}, modes="train aot dynamic")
def residuals_added_in_place(m, x):
    parts = [lin(p) for lin, p in zip(m.l, x.split(2, 1))]
    for p, q in zip(parts, x.split(2, 1)):
        p.add_(q)
    parts[0] *= 2
    y = torch.cat(parts, 1)
    y -= x
    return y, parts[1]


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)}, modes="train aot")
def activations_in_place_on_parts(m, x):
    y = torch.cat([lin(p) for lin, p in zip(m.l, x.split(2, 1))], 1)
    parts = y.split(3, 1) if not torch.is_grad_enabled() else [y[:, :3], y[:, 3:]]
    parts[0].mul_(3)
    a = y * 2
    F.leaky_relu(parts[1], 0.3, inplace=True)
    return a, y, torch.cat(list(parts), 1)


@graphs(
    (4, 6), modules=lambda: {"l": _linears(3, 2, 2), "r": nn.ReLU(True), "s": nn.Dropout(0.5, True)}
)
def modules_in_place_twice(m, x):
    parts = [m.s(lin(p)) for lin, p in zip(m.l, x.split(2, 1))]
    more = [m.r(p) for p in parts]
    return torch.cat(parts, 1), torch.cat(more, 1), parts[0] * more[0]


@graphs(PLAIN, modes="train again no_grad")
def input_written_by_part(m, x):
    a, b, c = x[:, :2], x[:, 2:4], x[:, 4:]
    a.add_(1)
    y = torch.cat([a, b, c], 1)
    b.mul_(c)
    x[:, 0] = 7
    return y, torch.cat([a, b, c], 1), torch.stack([a, b, c])


@graphs(PLAIN, modes="train again")
def input_written_and_returned(m, x):
    y = torch.cat(x.split(3, 1), 1)
    x.add_(y)
    return x, y, x.view(24), torch.cat(x.split(3, 1), 1)


@graphs(PLAIN, PLAIN.clone(), modes="train")
def inputs_swapped(m, x, y):
    t = torch.cat(x.split(3, 1), 1)
    x.copy_(y)
    y.copy_(t)
    return torch.cat([x[:, :3], y[:, 3:]], 1), torch.stack([x, y])


@graphs(PLAIN, modes="train")
def written_while_joined_views_live(m, x):
    y = x + 0
    a, b = y.unbind(0)[:2]
    s = torch.stack([a, b])
    y[0, 0] = 100
    t = torch.stack([a, b])
    a[1] = 200
    return s, t, torch.stack([y[0], y[1]]), y


@graphs(PLAIN, modes="train")
def written_through_transposes(m, x):
    y = x * 1
    t = y.t()
    t[0].mul_(3)
    z = torch.stack(t.unbind(0), 1)
    y.view(2, 12)[1] = 0
    y.unflatten(1, (2, 3))[:, 1].add_(1)
    y.diagonal()[:] = -1
    return z, torch.stack(t.unbind(0), 1), y


@graphs(PLAIN, modes="train")
def written_through_expanded_and_squeezed(m, x):
    y = x[:, None] * 1
    y.squeeze(1).add_(1)
    a = torch.cat([y[:, 0, :3], y[:, 0, 3:]], 1)
    y[..., 0] -= 5
    y.unsqueeze(0)[0, 1] = 2
    y.movedim(0, -1)[..., 3].zero_()
    return a, torch.cat([y[:, 0, :3], y[:, 0, 3:]], 1)


@graphs((4, 6), modes="train")
def view_of_written_returned(m, x):
    y = x.sin()
    v = y[:, 1:3]
    y.add_(1)
    return v, y[:, :2], torch.cat([v, v], 1)


@graphs((4, 6), modes="train")
def only_a_part_is_returned(m, x):
    y = torch.cat([p.exp() for p in x.split(2, 1)], 1)
    a, b = y[:, :3], y[:, 3:]
    b.neg_()
    return a, a + 1


@graphs(PLAIN, modes="train again")
def augmented_on_names_and_items(m, x):
    y = [x[:, :3] * 1, x[:, 3:] * 1]
    y[0] += y[1]
    y[1] -= y[0]
    z = y[0]
    z **= 2
    z /= 3
    w = z.int()
    w //= 2
    w %= 3
    w <<= 1
    w |= 1
    return y, w, torch.cat(y, 1)


@graphs((4, 6), modes="train")
def sources_written_after_copies(m, x):
    y = x * 1
    copies = [
        y.clone(),
        y.contiguous(),
        y.view(4, 6),
        y.reshape(24),
        y.detach(),
        y.data,
        y.to(y.dtype),
    ]
    with torch.no_grad():
        y.add_(1)
    return [c * 1 for c in copies], torch.cat([c.reshape(4, 6) for c in copies], 1)


@graphs((4, 6), modes="train")
def transposed_copies_and_writes(m, x):
    y = x.t() * 1
    c, r, t = y.contiguous(), y.reshape(-1), y.t().contiguous()
    y[0] = 0
    return c + 0, r + 0, t + 0, torch.cat([c.split(3, 0)[0], c.split(3, 0)[1]], 0)


@graphs((4, 6), modules=lambda: {"w": _param(6, 6), "v": _param(6, 6)}, modes="train again")
def parameters_stepped_in_the_graph(m, x):
    a, b = F.linear(x.detach(), m.w.detach()), F.linear(x.detach(), m.v.detach())
    with torch.no_grad():
        m.w.sub_(0.1 * m.w)
        m.v.copy_(m.w)
    return a, b, F.linear(x, m.w), F.linear(x, m.v)


@graphs(
    (4, 6),
    modules=lambda: {"k": torch.zeros(3, 2), "c": torch.zeros((), dtype=torch.long)},
    modes="train again no_grad",
)
def buffer_as_ring(m, x):
    parts = x.detach().split(2, 1)
    for i, p in enumerate(parts):
        m.k[i] = p.mean(0)
        m.c += 1
    y = torch.stack([p - q for p, q in zip(parts, m.k.unbind(0))])
    m.k.copy_(m.k.roll(1, 0))
    return y, m.k * 1, m.c + 0, [p * q for p, q in zip(parts, m.k.unbind(0))]


@graphs((4, 6), modules=lambda: {"b": torch.ones(6)}, modes="train again")
def buffer_replaced(m, x):
    a = [p * q for p, q in zip(x.split(2, 1), m.b.split(2))]
    m.b = m.b * 2
    b = [p * q for p, q in zip(x.split(2, 1), m.b.split(2))]
    m.b = m.b + 1
    return a, b, x * m.b


@graphs((4, 6), modules=lambda: {"b": torch.ones(6)}, modes="train")
def buffer_returned_and_viewed(m, x):
    m.b.mul_(3)
    return m.b, m.b[:3], torch.cat([m.b[:3], m.b[3:]]), x * m.b


@graphs(PLAIN, modes="train")
def random_writes(m, x):
    y = [p * 1 for p in x.split(2, 1)]
    y[0].uniform_()
    y[1].normal_(0, 1)
    z = torch.cat(y, 1)
    z.bernoulli_(0.5)
    return z, y, torch.rand(2)


@graphs((4, 6), modes="train")
def scatters_into_joined(m, x):
    y = torch.cat([p.sin() for p in x.split(2, 1)], 1)
    i = torch.tensor([[0], [1], [2], [3]])
    y.scatter_add_(1, i, x[:, :1])
    a = y.split(3, 1)[0] + 0
    y.index_add_(1, torch.tensor([0, 1]), x[:, :2])
    y.index_fill_(0, torch.tensor([2]), 1.5)
    y.index_copy_(1, torch.tensor([5]), x[:, :1])
    return a, y, torch.cat(y.split(3, 1), 1)


@graphs((4, 6), modes="train")
def triangles_and_diagonals(m, x):
    y = (x[:, :4] * 1).tril_()
    a = torch.cat(y.split(2, 1), 1)
    y.fill_diagonal_(2)
    return a, torch.cat(y.split(2, 1), 1), y.triu(1)


@graphs((4, 6), modes="train")
def written_only_if_read(m, x):
    y, z = x * 1, x * 1
    y.add_(1)
    z.add_(1)
    z.mul_(2)
    unused = x * 1
    unused.add_(100)
    return y, z, [p.relu() for p in y.split(2, 1)], [p.relu() for p in z.split(2, 1)]


@graphs((4, 6), modes="train")
def twins_of_which_one_is_written(m, x):
    a, b, c = x.sin(), x.sin(), x.sin()
    b.add_(1)
    return a + c, b, torch.cat([a, b, c], 1), torch.stack([a.sum(1), b.sum(1), c.sum(1)])


@graphs((4, 6), modes="train")
def twin_views_of_which_one_is_written(m, x):
    y = x * 1
    a, b = y[:, :2], y[:, :2]
    a.add_(1)
    return torch.cat([a, b], 1), torch.stack([a, b]), y


@graphs((4, 6), modes="train")
def writes_between_members(m, x):
    y = x * 1
    a = y[:, :2].tanh()
    y.mul_(2)
    b = y[:, 2:4].tanh()
    y.add_(1)
    c = y[:, 4:].tanh()
    return torch.cat([a, b, c], 1)


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)}, modes="train")
def writes_between_linears(m, x):
    y = x.detach() * 1
    a = m.l[0](y[:, :2])
    with torch.no_grad():
        y = y * 2
        m.l[1].bias.add_(1)
    b = m.l[1](y[:, 2:4])
    with torch.no_grad():
        m.l[2].bias.zero_()
    return torch.cat([a, b, m.l[2](y[:, 4:])], 1)


@graphs((4, 6), modes="train")
def lists_of_tensors_written(m, x):
    parts = (
        list((x * 1).chunk(3, 1)) if not torch.is_grad_enabled() else [p * 1 for p in x.chunk(3, 1)]
    )
    torch._foreach_add_(parts, 1.0)
    torch._foreach_mul_(parts, [1.0, 2.0, 3.0])
    y = torch.cat(parts, 1)
    torch._foreach_zero_(parts)
    return y, torch.cat(parts, 1)


@graphs(torch.arange(12.0).view(4, 3), modes="train")
def set_with_broadcast_and_step(m, x):
    y = torch.zeros(4, 6)
    y[:, ::2] = x
    y[:, 1::2] = x[:1]
    a = torch.cat(y.split(2, 1), 1)
    y[1:3, 1:3] = 5
    y[..., -1] = x[..., 0]
    y[None, 0, :, None] = 3.0
    return a, torch.cat(y.split(2, 1), 1)
