"""Graphs as text: read like code, repeated branches once."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import nn

from optimus.listing import listing
from tests.optimus.capture import Captured


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"towers": nn.ModuleList(nn.Linear(4, 2) for _ in range(5))})
        self.scale = nn.Parameter(torch.ones(10))
        self.register_buffer("shift", torch.ones(10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        towers = enumerate(self.body["towers"])
        first = [tower(x[:, 4 * i : 4 * i + 4]).relu() for i, tower in towers]
        out = torch.cat(first, dim=1) * self.scale + self.shift
        low, high = out.to(torch.float64).chunk(2, dim=-1)
        return low @ high.mT, 1 - y


def test_golden() -> None:
    graph = Captured(Model(), (torch.ones(3, 20), torch.ones(2))).module.graph
    marked = [n.name for n in graph.nodes if n.name.startswith("cat")]
    assert_expected_inline(
        listing(graph, marked, "-"),
        """\
  # body.towers.#.weight: 5 x f32[2, 4]
  # body.towers.#.bias: 5 x f32[2]
  # scale: f32[10]
  # shift: f32[10]
  x: f32[3, 20] = input
  y: f32[2] = input
  getitem: f32[3, 4] = x[:, 0:4]
  linear: f32[3, 2] = linear(getitem, body.towers.0.weight, body.towers.0.bias)
  relu: f32[3, 2] = linear.relu()
      ... 4 more times these 3 lines: getitem_1 to relu_4
- cat: f32[3, 10] = cat([relu, relu_1, relu_2, relu_3, relu_4], dim=1)
  mul: f32[3, 10] = cat * scale
  out: f32[3, 10] = mul + shift
  to: f64[3, 10] = out.to(float64)
  chunk: 2 x f64[3, 5] = to.chunk(2, dim=-1)
  getattr_1: f64[5, 3] = getattr(chunk[1], 'mT')
  matmul: f64[3, 3] = chunk[0] @ getattr_1
  sub: f32[2] = 1 - y
  return matmul, sub""",
    )


def test_dynamic_sizes() -> None:
    captured = Captured(lambda x: x.flatten(0, 1).sum(0), (torch.ones(6, 4, 5),), dynamic=True)
    text = listing(captured.module.graph)
    assert "x: f32[s" in text and ", 4, 5] = input" in text


def test_few_repeats_are_written_out() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + x.exp() * x.sin()

    assert "more times" not in listing(Captured(program, (torch.ones(3),)).module.graph)


def test_values_that_differ_are_no_repeats() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.clamp(0, bound) for bound in (1, 2, 3, 4)]

    text = listing(Captured(program, (torch.ones(3),)).module.graph)
    assert all(f"x.clamp(0, {bound})" in text for bound in (1, 2, 3, 4))
