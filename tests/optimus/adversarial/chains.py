"""Graphs of linears one behind the other, with nothing in between."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.optimus.adversarial.graphs import Graphs

graphs = Graphs()
ROWS = torch.randn(60, 4, requires_grad=True)


def _weights(**bias: int):
    sizes = {"a": (12, 4), "b": (4, 12), "c": (4, 4)}
    parts = {name: nn.Parameter(torch.randn(*size)) for name, size in sizes.items()}
    return parts | {name: nn.Parameter(torch.randn(size)) for name, size in bias.items()}


@graphs(ROWS, modules=lambda: _weights(p=1, q=1, r=12))
def chains_with_biases_that_broadcast(m, x):
    one = F.linear(F.linear(x, m.a, m.p), m.b, m.q)
    return one, F.linear(F.linear(x, m.a, m.r), m.b, m.q), F.linear(F.linear(x, m.a), m.b, m.q)


@graphs(ROWS, modules=lambda: _weights(r=12))
def chains_with_tied_weights(m, x):
    h = F.linear(F.linear(x, m.a, m.r), m.a.t())
    return h, F.linear(F.linear(h, m.a), m.b), F.linear(F.linear(x, m.c), m.c)


@graphs(ROWS, modules=lambda: _weights(r=12), modes="train aot")
def chains_partly_without_gradient(m, x):
    one = F.linear(F.linear(x, m.a.detach(), m.r), m.b)
    two = F.linear(F.linear(x.detach(), m.a, m.r.detach()), m.b.detach())
    with torch.no_grad():
        h = F.linear(x, m.a)
    return one, two, F.linear(h, m.b), F.linear(F.linear(x, m.a), m.b).detach()
