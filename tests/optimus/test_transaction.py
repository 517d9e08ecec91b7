"""Calls in other words, matches found by one walk, and what may be handed to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import EVERY_CALL, Match, SweepPattern
from tests.optimus.capture import names, refused, rewritten
from tests.optimus.handmade import local

X = torch.randn(3, 4)


def whole(node: Node) -> Match:
    """Just the anchor."""
    return Match((node,))


def saying(name: str, **arguments: Any) -> Callable[[Match, Editor], None]:
    """A rewrite that says the anchor in other words, of the same input."""

    def rewrite(match: Match, edit: Editor) -> None:
        edit.respell(match.anchor, name, input=match.anchor.args[0], **arguments)

    return rewrite


class TestOtherWords:
    def test_same_meaning(self) -> None:
        pattern = local("t", whole, saying("transpose", dim0=0, dim1=1))
        module, reports = rewritten(lambda x: x.t() + 1, (X,), pattern)
        assert names(module) == ["transpose", "add"]
        assert reports["handmade"].fired == 1

    def test_another_value(self) -> None:
        pattern = local("t", whole, saying("transpose", dim0=0, dim1=0))
        assert refused(lambda x: x.t() + 1, (X,), pattern) == "other words for t have another value"

    def test_call_that_fails(self) -> None:
        pattern = local("t", whole, saying("transpose", dim0=0, dim1=5))
        assert refused(lambda x: x.t() + 1, (X,), pattern) == "other words for t have another value"

    def test_other_inputs(self) -> None:
        def rewrite(match: Match, edit: Editor) -> None:
            edit.respell(match.anchor, "relu", input=match.anchor.args[0].args[0])

        def match(node: Node) -> Match | None:
            return whole(node) if node.args[0].op != "placeholder" else None  # type: ignore[union-attr]

        reason = refused(lambda x: x.relu().relu(), (X,), local("relu", match, rewrite))
        assert reason.endswith("other words for relu have other inputs")

    def test_a_node_outside_the_match(self) -> None:
        def rewrite(match: Match, edit: Editor) -> None:
            edit.respell(next(iter(match.anchor.users)), "relu", input=match.anchor)

        reason = refused(lambda x: x.t().relu(), (X,), local("t", whole, rewrite))
        assert reason == "says relu in other words, which is outside its match"


class MergeTwins(SweepPattern):
    """Compute equal calls of one input once."""

    anchors = ("relu", "tanh")
    family = "vertical"
    loner = "no twin"

    def matches(self, nodes: Sequence[Node]) -> Iterator[Match]:
        seen: dict[Any, Node] = {}
        for node in nodes:
            first = seen.setdefault((node.target, node.args), node)
            if first is not node:
                yield Match((node, first), (node.args[0],), {"first": first})  # type: ignore[arg-type]

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, match["first"])

    @classmethod
    def examples(cls) -> Sequence[Any]:
        return ()


class MergeAllTwins(MergeTwins):
    anchors = EVERY_CALL


class TestSweep:
    def test_sees_what_it_has_done(self) -> None:
        def program(x: Tensor) -> Tensor:
            return x.relu().tanh() * x.relu().tanh()

        module, reports = rewritten(program, (X,), MergeTwins())
        assert names(module) == ["relu", "tanh", "mul"]
        assert (reports["merge_twins"].fired, reports["merge_twins"].anchors) == (2, 4)

    def test_misses(self) -> None:
        _, reports = rewritten(lambda x: x.relu() + 1, (X,), MergeTwins())
        assert list(reports["merge_twins"].misses) == ["no twin"]

    def test_every_call(self) -> None:
        module, _ = rewritten(lambda x: x.floor() + x.floor(), (X,), MergeAllTwins())
        assert names(module) == ["floor", "add"]

    def test_grad_modes_are_apart(self) -> None:
        def program(x: Tensor) -> Tensor:
            a = x.relu()
            with torch.no_grad():
                b = x.relu()
            return a + b + x.relu() + b

        module, _ = rewritten(program, (X.clone().requires_grad_(),), MergeTwins())
        assert names(module).count("relu") >= 2


class TestReturnedViews:
    def drop(self, anchor: str) -> Any:
        """Leave out calls that change nothing."""

        def rewrite(match: Match, edit: Editor) -> None:
            edit.replace(match.anchor, match.anchor.args[0])  # type: ignore[arg-type]

        return local(anchor, whole, rewrite)

    def test_of_an_input(self) -> None:
        reason = refused(lambda x: x.detach(), (X,), self.drop("detach"))
        assert reason == "detach is returned as a tensor of its own"

    def test_of_another_output(self) -> None:
        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.relu()
            return y, y.view(3, 4)

        reason = refused(program, (X,), self.drop("reshape"))
        assert reason == "reshape is returned as a tensor of its own"

    def test_of_what_is_returned_by_a_write_to_it(self) -> None:
        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.relu()
            z = y.view(3, 4)
            y += 1
            return y, z

        # Not made functional, as it is in what comes before the patterns.
        reason = refused(program, (X,), self.drop("reshape"))
        assert reason == "reshape is returned as a tensor of its own"

    def test_of_a_hidden_value(self) -> None:
        module, _ = rewritten(lambda x: x.relu().view(3, 4), (X,), self.drop("reshape"))
        assert names(module) == ["relu"]
