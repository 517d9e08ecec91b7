"""Patterns as a user may write them: a good one, and some that are broken in different ways."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

import optimus
from optimus.editor import Editor
from optimus.ops import arguments, op_of
from optimus.pattern import Example, GroupPattern, Match, Miss, Pattern, Rewrite


class Negated(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(-torch.neg(x)) + torch.neg(torch.relu(x).neg()) - torch.neg(x)


class NegatedOnce(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(-x)


@dataclass(frozen=True)
class CancelDoubleNegation(Pattern):
    """neg(neg(x)) -> x"""

    only_relu: bool = False

    anchors = ("neg",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        inner = (arguments(node) or {}).get("input")
        op = op_of(inner) if isinstance(inner, Node) else None
        if op is None or op.name != "neg":
            return Miss("its input is not negated")
        source = arguments(inner)["input"]
        if self.only_relu and getattr(op_of(source), "name", "") != "relu":
            return Miss("not of a relu")
        return Match((node, inner), values={"source": source})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, match["source"])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = (torch.randn(3, 4, requires_grad=True),)
        return (
            Example("twice", lambda: (Negated(), x), fires=2),
            Example("once", lambda: (NegatedOnce(), x), fires=0),
        )


@dataclass(frozen=True)
class Broken(CancelDoubleNegation):
    """Matches every negation; what it does there is up to those below."""

    def match(self, node: Node) -> Match | Miss:
        return Match((node,), values={"source": arguments(node)["input"]})


@dataclass(frozen=True)
class RaisesInMatch(Broken):
    def match(self, node: Node) -> Match | Miss:
        raise RuntimeError("I am broken")


@dataclass(frozen=True)
class RaisesInRewrite(Broken):
    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.call("relu", match["source"])
        raise RuntimeError("I am broken")


@dataclass(frozen=True)
class ComputesSomethingElse(Broken):
    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call("relu", match["source"]))


@dataclass(frozen=True)
class WritesToTheGraph(Broken):
    """Goes past the editor, which knows nothing of the nodes that come and go."""

    def match(self, node: Node) -> Match | Miss:
        with node.graph.inserting_after(node):
            node.replace_all_uses_with(node.graph.call_function(torch.neg, (node,)))
        node.graph.erase_node(node)
        return Miss("I did something terrible")


@dataclass(frozen=True)
class NeverEnds(Broken):
    def rewrite(self, match: Match, edit: Editor) -> None:
        zero = edit.call("mul", match["source"], -1)
        edit.replace(match.anchor, edit.call("neg", edit.call("neg", zero)))


@dataclass(frozen=True)
class GroupsRaise(GroupPattern):
    anchors = ("neg",)
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        raise RuntimeError("I am broken")

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        raise AssertionError("never comes here")

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return ()


@contextmanager
def registered(pattern: Rewrite, **place: Any) -> Iterator[str]:
    """Take part in everything for a while."""
    optimus.register(pattern, **place)
    try:
        yield pattern.name()
    finally:
        optimus.unregister(pattern.name())
