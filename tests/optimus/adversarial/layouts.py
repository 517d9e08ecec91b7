"""Graphs whose readers look at memory: strides, offsets, views, aliases, writes."""

# ruff: noqa: RUF059 (names as a user gives them)

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs
from tests.optimus.program import add_one_, memory_order

graphs = Graphs()
PLAIN = torch.arange(24.0).view(4, 6)


@graphs((4, 6))
def as_strided_of_joined_parts(m, x):
    a, b, c = x.split(2, 1)
    return torch.as_strided(torch.cat([b, c], 1), (4, 2), (4, 1), 1).exp()


@graphs((4, 6))
def as_strided_of_restacked_places(m, x):
    return torch.as_strided(torch.stack(x.unbind(1), 0), (3, 2), (2, 1)) * 2


@graphs((4, 6), modes="train")
def view_as_complex_at_odd_offset(m, x):
    a, b, c = x.split([1, 2, 3], 1)
    return torch.view_as_real(torch.view_as_complex(torch.cat([b, c[:, :2]], 1).view(4, 2, 2)) * 1j)


@graphs((4, 6))
def view_as_complex_of_restacked(m, x):
    a, b = x[:, :2].unbind(1)
    return torch.view_as_complex(torch.stack([a, b], -1)).abs()


@graphs(PLAIN)
def bits_of_joined_parts(m, x):
    a, b, c = x.split(2, 1)
    return torch.cat([a, b], 1).view(torch.int32) + 1, torch.cat([b, c], 0).view(torch.uint8)


@graphs(PLAIN)
def custom_operator_minds_strides(m, x):
    places = torch.stack(x.unbind(1), 0)
    return memory_order(places), memory_order(torch.cat(x.split(3, 1), 1))


@graphs(PLAIN)
def custom_operator_writes_to_part(m, x):
    y = x * 1
    a, b = y[:, :3], y[:, 3:]
    add_one_(a)
    return torch.cat([a, b], 1), y + 0


@graphs((4, 6))
def reshape_copied_then_written(m, x):
    y = torch.stack([x.sin(), x.cos()], 1)
    z = y.transpose(1, 2).reshape(-1)
    z.add_(1)
    return y * 1, z


@graphs((4, 6), modules=lambda: {"w": nn.Linear(2, 3)})
def reshape_copied_behind_moved_transpose(m, x):
    y = torch.stack([x.sin(), x.cos()], 1)
    t = y.transpose(1, 2)
    z = t.reshape(-1, 2)
    out = m.w(t)
    z.add_(1)
    return out, torch.bmm(y, t), z


@graphs((4, 6), modules=lambda: {"w": nn.Linear(2, 3)})
def contiguous_behind_moved_transpose(m, x):
    y = torch.stack([x.sin(), x.cos()], 1)
    t = y.transpose(1, 2)
    c = t.contiguous()
    return m.w(t), torch.bmm(y, t), c


@graphs((4, 6), modules=lambda: {"w": nn.Linear(2, 3)})
def moved_transpose_returned(m, x):
    y = torch.stack([x.sin(), x.cos()], 1)
    t = y.transpose(1, 2)
    return m.w(t), t, torch.bmm(y, t)


@graphs((4, 6))
def flat_view_written_after_restack(m, x):
    y = torch.stack(x.unbind(1), 0)
    y.reshape(-1)[1:3] = 7.0
    return y


@graphs((4, 6))
def joined_then_written_beside_source(m, x):
    y = x * 2
    z = torch.cat(y.split(2, 1), 1)
    y.add_(1)
    return z, y


@graphs((4, 6))
def source_written_through_other_view(m, x):
    y = x * 2
    a, b = y[:, :3], y[:, 3:]
    z = torch.cat([a, b], 1)
    y.view(-1)[0] = 5.0
    return z * 1


@graphs(PLAIN)
def input_returned_and_joined_again(m, x):
    return x, torch.cat(x.split(2, 1), 1), torch.stack([x])[0]


@graphs(PLAIN)
def views_of_inputs_returned(m, x):
    return x.view(-1), x[:, :3], torch.cat([x[:, :3], x[:, 3:]], 1), x.t()


@graphs((4, 6))
def output_twice_and_again_as_view(m, x):
    y = x.relu()
    return y, y, y.view(-1), y[:, 1:]


@graphs((4, 6))
def equal_outputs_stay_apart(m, x):
    return x.relu(), x.relu(), x.relu().relu()


@graphs(PLAIN)
def input_written_then_parts_joined(m, x):
    a = torch.cat([x[:, :3], x[:, 3:]], 1)
    x.mul_(2)
    b = torch.cat([x[:, :3], x[:, 3:]], 1)
    return a, b


@graphs(PLAIN)
def setitem_between_equal_reads(m, x):
    a = x[:, :3].exp()
    x[:, 0] = 1
    b = x[:, :3].exp()
    return a, b, a + b


@graphs(PLAIN, PLAIN + 1)
def copy_swaps_inputs(m, x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    return x + y, t


@graphs(PLAIN)
def out_argument_is_an_input(m, x):
    y = torch.sin(x)
    torch.add(y, 1, out=x)
    return torch.cat(x.split(3, 1), 1), y


@graphs(PLAIN)
def out_argument_is_fresh(m, x):
    buf = torch.empty_like(x)
    torch.mul(x, 2, out=buf)
    z = torch.cat(buf.split(3, 1), 1)
    torch.mul(x, 3, out=buf)
    return z, buf


@graphs((4, 6))
def unsqueezed_in_place(m, x):
    y = x.mul(3)
    y.unsqueeze_(0)
    z = x.mul(2).t_()
    return y, z, y.squeeze_(0)


@graphs((4, 6))
def transposed_in_place_then_joined(m, x):
    y = x.sin()
    y.transpose_(0, 1)
    return torch.cat([y[:3], y[3:]], 0), torch.stack(y.unbind(0), 1)


@graphs((4, 6))
def member_of_batched_result_written(m, x):
    a, b, c = (torch.tanh(p) for p in x.split(2, 1))
    b = b + 0
    b.mul_(3)
    return torch.cat([a, b, c], 1), b.sum(1)


@graphs((4, 6), modules=lambda: {"l": nn.ModuleList(nn.Linear(3, 3) for _ in range(2))})
def member_of_batched_linears_written(m, x):
    a, b = (lin(p) for lin, p in zip(m.l, x.split(3, 1), strict=True))
    a += b
    F.relu(b, inplace=True)
    return a, b


@graphs((4, 6))
def chunk_written_in_place_under_no_grad(m, x):
    y = x * 1
    with torch.no_grad():
        y[:, :2].zero_()
    return torch.cat(y.split(2, 1), 1) * y


@graphs((4, 6))
def expanded_then_split_and_joined(m, x):
    y = x[:, :1].expand(-1, 6)
    return torch.cat(y.split(2, 1), 1), torch.stack(y.unbind(1), 1), y.split(3, 1)[0] + 1


@graphs(torch.randn(4, 1).expand(4, 6))
def expanded_input(m, x):
    return torch.cat([p.tanh() for p in x.split(2, 1)], 1), torch.cat(x.split(2, 1), 1)


@graphs(torch.randn(6, 4).t())
def transposed_input(m, x):
    return torch.cat(x.split(2, 1), 1), torch.stack([p.exp() for p in x.split(2, 1)]), x.relu()


@graphs(torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last))
def channels_last(m, x):
    parts = [p.relu() for p in x.split(2, 1)]
    return torch.cat(parts, 1), torch.cat(x.split(3, 1), 1), parts[0], x.clone(), x.contiguous()


@graphs(
    torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last),
    modules=lambda: {"c": nn.Conv2d(6, 2, 1)},
    modes="train",
)
def conv_of_joined_channels_last(m, x):
    return m.c(torch.cat(x.split(3, 1), 1)), m.c(torch.cat([p.tanh() for p in x.split(3, 1)], 1))


@graphs((4, 6))
def likes_keep_layout(m, x):
    y = torch.stack(x.unbind(1), 0)
    z = torch.cat(x.split(3, 1), 1)
    return torch.zeros_like(y), torch.ones_like(z), y.new_zeros(2), torch.empty_like(z).fill_(1)


@graphs((4, 6))
def branch_on_contiguity(m, x):
    y = torch.stack(x.unbind(1), 0)
    if y.is_contiguous():
        return y.view(-1) * y.stride(0)
    return y


@graphs((4, 6))
def detached_views_returned(m, x):
    y = x * 2
    return y.detach(), torch.cat(y.detach().split(3, 1), 1), y


@graphs((4, 6))
def detached_memory_written(m, x):
    y = x * 2
    d = y.detach()
    d.add_(1)
    return torch.cat(y.split(3, 1), 1), d.sum()


@graphs(PLAIN)
def rows_swapped_through_views(m, x):
    y = x.clone()
    a, b = y[0], y[1]
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    return y, torch.stack([a, b])


@graphs(PLAIN)
def foreach_writes(m, x):
    parts = [p.clone() for p in x.split(2, 1)]
    torch._foreach_mul_(parts, 2.0)
    more = torch._foreach_add(parts, 1.0)
    torch._foreach_add_(parts, more)
    return torch.cat(parts, 1), torch.cat(list(more), 1)


@graphs(PLAIN)
def accumulates_in_a_loop(m, x):
    total = torch.zeros(4, 2)
    for p in x.split(2, 1):
        total += p.relu()
        total[:, 0] *= 2
    return total


@graphs(PLAIN)
def index_put_and_scatter(m, x):
    y = x.relu()
    a = torch.cat(y.split(3, 1), 1)
    y.index_put_((torch.tensor([0, 1]),), torch.tensor(9.0))
    b = torch.cat(y.split(3, 1), 1)
    y.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 3.0)
    return a, b, y


@graphs(PLAIN)
def masked_and_diagonal_writes(m, x):
    y = x * 1
    y[y > 5] = 0
    y.diagonal().add_(10)
    y.masked_fill_(y == 0, -1)
    y[..., None, 1:3] += 2
    return y, torch.stack(y.unbind(1), 1)


@graphs((4, 6))
def real_and_imaginary(m, x):
    c = torch.complex(x[:, :3], x[:, 3:])
    j = torch.cat([c.conj()])
    k = torch.cat(c.conj().split(1, 1), 1)
    return torch.view_as_real(j), torch.view_as_real(k), k.imag, torch.stack([c.conj()])[0].real


@graphs((4, 6))
def negated_bit(m, x):
    c = torch.complex(x[:, :3], x[:, 3:])
    y = c.conj().imag
    return torch.cat([y]).view(torch.int32), torch.cat(y.split(1, 1), 1).exp()


@graphs((4, 6))
def complex_branches(m, x):
    c = torch.complex(x, x.flip(1))
    parts = [torch.tanh(p) * p.conj() for p in c.split(2, 1)]
    return torch.cat(parts, 1).abs(), torch.stack([p.sum(1) for p in parts]).real


@graphs((4, 6))
def unfold_and_windows(m, x):
    y = torch.cat(x.split(3, 1), 1)
    return y.unfold(1, 2, 1) * 1, F.pad(y, (1, 0)).as_strided((4, 2), (7, 1))


@graphs(torch.randn(5, 4, 6)[1:, :, ::2])
def strided_input_with_offset(m, x):
    a, b, c = x.unbind(2)
    return torch.stack([a, b, c], 2), torch.cat([a, b, c], 1), [p.tanh() for p in x.unbind(2)]


@graphs((4, 6), modes="train")
def dimensions_of_scalars(m, x):
    sums = [column.sum() for column in x.unbind(1)]
    moved = [s.movedim(0, -1).transpose(0, -1).swapaxes(-1, 0).t().permute(()) for s in sums]
    reduced = [s.sum(0) + s.mean(-1) + s.amax(0) + s.softmax(-1) + s.squeeze(-1) for s in moved]
    return torch.stack([F.normalize(s, dim=0) * s.flatten().sum() for s in reduced])


@graphs((4, 6), modes="train")
def product_of_scalars_summed(m, x):
    return torch.stack([(column.sum() * column.mean()).sum(0) for column in x.unbind(1)])
