"""Graphs that return views, inputs, parameters, doubles and nested values."""

# ruff: noqa: B905, RUF059 (as a user writes it)

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()
PLAIN = torch.arange(24.0).view(4, 6)


@dataclass
class Result:
    """What a user's model may return."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]


def _param(*shape):
    return nn.Parameter(torch.randn(*shape))


def _linears(count, *sizes):
    return nn.ModuleList(nn.Linear(*sizes) for _ in range(count))


@graphs((4, 6), modes="train no_grad inference")
def parts_of_input_returned(m, x):
    return x.split(2, 1), x.unbind(1), x.chunk(2, 1)[0], x[:, 2:4], x.t(), x.view(-1)


@graphs((4, 6), modes="train no_grad aot")
def parts_of_result_returned(m, x):
    y = x * 2
    return y.split(2, 1), torch.cat(y.split(2, 1), 1), y[:, :3]


@graphs((4, 6), modes="train no_grad")
def views_given_back_by_idle_calls(m, x):
    y = x * 2
    same = y.view(4, 6)
    return (
        x[:, 0:6].flatten(1), x.view(4, 6).contiguous(), F.dropout(x[:], 0.5, False),
        x.reshape(4, 6).to(torch.float32).float(), y, same.flatten(1), same.to(y.dtype),
    )  # fmt: skip


@graphs(PLAIN, modes="train no_grad")
def views_of_what_a_call_in_place_gave_back(m, x):
    y = F.relu(x, inplace=True)
    (a,) = y.split(4)
    z = torch.relu_(x * 2)
    (b,) = z.split(6, 1)
    (c,) = z.mul_(2).chunk(1)
    return a, b, c, z.add_(1).split(4)[0]


@graphs((4, 6), modes="train no_grad")
def whole_and_parts_returned(m, x):
    y = torch.cat([p.exp() for p in x.split(2, 1)], 1)
    a, b, c = y.split(2, 1)
    return y, a, b, c


@graphs((4, 6), modes="train no_grad aot")
def parts_of_a_stack_returned(m, x):
    y = torch.stack([p.exp() for p in x.split(2, 1)])
    a, b, c = y.unbind()
    return a, c, y.sum(0), y[1]


@graphs((4, 6), modes="train aot")
def members_returned_beside_their_join(m, x):
    a, b, c = (p.tanh() for p in x.split(2, 1))
    return a, torch.cat([a, b, c], 1), c, torch.stack([a, b])


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)}, modes="train no_grad aot dynamic")
def each_tower_returned(m, x):
    a, b, c = (lin(p) for lin, p in zip(m.l, x.split(2, 1)))
    return a, b, c


@graphs((4, 6), modules=lambda: {"l": _linears(3, 6, 2)}, modes="train no_grad aot")
def each_head_returned(m, x):
    return {str(i): lin(x) for i, lin in enumerate(m.l)}


@graphs((4, 6), modules=lambda: {"l": _linears(3, 6, 2)}, modes="train aot")
def one_head_twice_and_as_view(m, x):
    a, b, c = (lin(x) for lin in m.l)
    return a, a, b.view(-1), b, c.t(), c[:, :1]


@graphs((4, 6), modules=lambda: {"l": nn.Linear(6, 2)}, modes="train aot no_grad")
def one_weight_many_results(m, x):
    return m.l(x), m.l(x * 2), m.l(x).view(-1), m.l(x + 1).unbind(1)


@graphs((4, 6), modules=lambda: {"w": _param(6, 6), "b": torch.ones(6)}, modes="train no_grad")
def parameters_and_buffers_returned(m, x):
    return m.w, m.b, m.w[:2], m.w.t(), m.b.view(2, 3), torch.cat([m.w[:3], m.w[3:]]), x @ m.w


@graphs(PLAIN, PLAIN.clone(), modes="train")
def inputs_returned_in_other_order(m, x, y):
    return y, x, torch.cat([x, y], 1), x, (y, [x])


@graphs((4, 6), modes="train no_grad")
def noops_of_inputs_returned(m, x):
    return (
        x.contiguous(), x.view(4, 6) if x.shape[0] == 4 else x, x.to(x.dtype), x.float(),
        x.expand(-1, 6), x.reshape(x.shape), x.detach(), x.squeeze(1), x.transpose(0, 0),
        x.narrow(1, 0, 6), x[:], x[...],
    )  # fmt: skip


@graphs((4, 6), modes="train no_grad aot")
def noops_of_results_returned(m, x):
    y = x * 2
    return (
        y, y.contiguous(), y.view(y.shape), y.to(y.dtype), y.detach(), y[:], y.squeeze(1),
        y.view_as(y), F.dropout(y, 0.5, False), torch.cat([y]), torch.stack([y])[0],
        y.expand(-1, 6),
    )  # fmt: skip


@graphs((4, 6), modes="train aot")
def joined_of_one_returned(m, x):
    y = x.exp()
    (a,) = y.split(6, 1)
    return (
        torch.cat([x], 1),
        torch.cat([y], 1),
        a,
        torch.stack([x]).squeeze(0),
        x.unsqueeze(0).squeeze(0),
    )


@graphs((4, 6), modes="train no_grad aot")
def restored_after_cuts_returned(m, x):
    y = x.sin()
    return (
        torch.cat(x.split(2, 1), 1), torch.cat(y.split(2, 1), 1), torch.stack(x.unbind(1), 1),
        torch.stack(y.unbind(1), 0), torch.stack(y.split(2, 1)), torch.cat(y.unbind(1)),
        torch.cat([p.unsqueeze(1) for p in y.unbind(1)], 1), torch.stack(y.unbind(0)),
    )  # fmt: skip


@graphs((4, 6), modules=lambda: {"l": _linears(3, 2, 2)}, modes="train")
def result_in_a_dataclass(m, x):
    hidden = [lin(p) for lin, p in zip(m.l, x.split(2, 1))]
    r = Result(torch.cat(hidden, 1), hidden)
    return r.logits, r.hidden, None, (), {"a": None, "b": [hidden[0]]}, 1.5, "text", x.dtype


@graphs((4, 6), modes="train")
def empty_parts_returned(m, x):
    a, b, c = x.split([0, 6, 0], 1)
    return a, b, c, torch.cat([a, b], 1), x[:, 3:3], torch.cat([x[:0], x]), x.new_empty(0, 6)


@graphs((4, 6), modes="train aot")
def layouts_of_results(m, x):
    y = x.view(-1, 2, 3)
    parts = y.unbind(1)
    return (
        torch.stack([p.relu() for p in parts], 0), torch.stack(parts, 2), torch.stack(parts, 1).mT,
        y.transpose(0, 1).relu(), y.mT.exp(), torch.cat([y.mT, y.mT], 1), y.permute(2, 0, 1) * 2,
        y.mT + 1, torch.zeros_like(y.mT), y.mT.clone(), y.mT.contiguous(),
        [p.t().tanh() for p in parts], torch.stack([p.t().tanh() for p in parts]),
        y[:, :, ::2].sin(),
    )  # fmt: skip


@graphs((4, 2, 6), modules=lambda: {"l": _linears(2, 6, 3)}, modes="train aot dynamic")
def layouts_of_linears(m, x):
    return [
        m.l[0](x), m.l[1](x), m.l[0](x.transpose(0, 1)), m.l[1](x[:, 0]), m.l[1](x[:, 1]),
        m.l[0](x).mT, m.l[0](x[:, 0]).t(), x.transpose(0, 1) @ m.l[0].weight.t(),
        torch.einsum("bnd,fd->nbf", x, m.l[1].weight),
        torch.stack([lin(p) for lin, p in zip(m.l, x.unbind(1))], 1), m.l[0].weight @ x.mT,
    ]  # fmt: skip


@graphs(
    torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last),
    modules=lambda: {"c": nn.Conv2d(6, 6, 1), "b": nn.BatchNorm2d(6), "p": nn.MaxPool2d(2)},
    modes="train aot",
)
def channels_last_towers(m, x):
    y = m.b(m.c(x))
    a, b = y.chunk(2, 1)
    return (
        a.relu(),
        torch.cat([a.relu(), b.tanh()], 1),
        torch.cat([p.exp() for p in (a, b)], 1),
        m.p(y),
    )


@graphs((4, 6), modes="train")
def grad_flags_of_results(m, x):
    with torch.no_grad():
        a = x * 2
        b = torch.cat([x[:, :3].exp(), x[:, 3:].exp()], 1)
    c = x.detach() * 2
    d = torch.cat([c[:, :3].exp(), x[:, 3:].exp()], 1)
    return a, b, c, d, x.detach()[:, :2], (x > 0), x.argmax(1), a.view(-1), torch.stack([a, c])


@graphs((4, 6), modules=lambda: {"l": _linears(4, 6, 2)}, modes="train aot again")
def losses_of_some_heads(m, x):
    a, b, c, d = (lin(x) for lin in m.l)
    with torch.no_grad():
        metric = (a.sigmoid() > 0.5).float().mean() + b.sum()
    return F.mse_loss(a, c.detach()), metric, d.detach(), {"logits": c}


@graphs((4, 6), modes="train inference no_grad")
def all_in_one_mode(m, x):
    parts = [p.relu() for p in x.split(2, 1)]
    y = torch.cat(parts, 1)
    y.add_(1)
    return y, parts[0].sum(), y.view(-1)[:3], x.t()


@graphs(torch.randn(4, 6, requires_grad=True), modes="train")
def leaf_returned_as_it_is(m, x):
    return x, x.view_as(x), x + 0, x.detach().requires_grad_(False)
