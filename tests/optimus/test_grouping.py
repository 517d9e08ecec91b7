"""One pass of group patterns: what it has read of a graph holds until the graph changes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from optimus.driver import Phase, rewrite
from optimus.editor import Editor
from optimus.grouping import Keys
from optimus.legality import Legality
from optimus.merging import input_of
from optimus.pattern import Example, GroupPattern
from optimus.pieces import unstack
from tests.optimus.capture import Captured
from tests.optimus.patterns.rewriting import listing


@dataclass(frozen=True)
class StackTanhs(GroupPattern):
    """Runs all tanhs of one shape on a copy of their inputs. `asked`: of which nodes, and of which
    groups, it was asked."""

    asked: list[str] = field(default_factory=list[str], compare=False)

    anchors = ("tanh",)
    family = "horizontal"

    def key(self, node: Node) -> Hashable:
        self.asked.append(node.name)
        return ()

    def copies(self, group: Sequence[Node]) -> bool:
        self.asked.append(f"copies {len(group)}")
        return True

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        out = edit.call("tanh", edit.call("stack", [input_of(node) for node in group]))
        for node, part in zip(group, unstack(edit, out, len(group)), strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return ()


def test_postponed_groups_are_not_looked_for_again() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a = torch.tanh(x)
        b = torch.tanh(y)
        return a * b

    pattern, module = StackTanhs(), Captured(program, (torch.randn(3), torch.randn(3))).module
    reports = rewrite(module, (Phase("test", (pattern,)),), strict=True)
    # Both tanhs, a pass that may not copy and one that may; then the tanh that this one has made.
    assert pattern.asked == ["a", "b", "copies 2", "tanh_2"]
    assert reports[-1].fired == 1 and reports[-1].anchors == 2
    assert "tanh_2 = tanh(stack)" in listing(module)


def test_a_key_is_read_anew_when_the_call_is_another() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a = torch.clamp(x, 0.0)
        b = torch.clamp(y, 0.0)
        return a + b

    graph = Captured(program, (torch.randn(3), torch.randn(3).double())).module.graph
    keys, legality = Keys(), Legality(graph)
    a, b = (node for node in graph.nodes if node.target is torch.clamp)
    first = keys.common(a, legality)
    assert keys.common(a, legality) == first != keys.common(b, legality)
    x = a.args[0]
    a.args = (x, 1.0)
    other = keys.common(a, legality)
    assert other not in (first, keys.common(b, legality))
    a.args = (x, 0.0)
    assert keys.common(a, legality) == first
