"""Patterns made on the spot, most of them wrong on purpose, for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch.fx import Node

from optimus.editor import Editor
from optimus.ops import op_of
from optimus.pattern import GroupPattern, Match, Miss, Pattern
from optimus.pieces import stack, unstack


def local(
    anchor: str,
    match: Callable[[Node], Match | Miss | None],
    rewrite: Callable[[Match, Editor], None],
    *,
    replaces_effects: bool = False,
) -> Pattern:
    """A pattern on one operation; `match` may answer None where it has nothing to say."""

    class Handmade(Pattern):
        anchors = (anchor,)
        family = "vertical"

        def match(self, node: Node) -> Match | Miss:
            return match(node) or Miss("not this one")

        def rewrite(self, match: Match, edit: Editor) -> None:
            rewrite(match, edit)

        @classmethod
        def examples(cls) -> Sequence[Any]:
            return ()

    Handmade.replaces_effects = replaces_effects
    return Handmade()


def batch_pointwise(*anchors: str) -> GroupPattern:
    """Run equal calls of one input each as one call on their stack."""

    class BatchPointwise(GroupPattern):
        family = "horizontal"

        def key(self, node: Node) -> Hashable | Miss:
            inputs = node.all_input_nodes
            if len(inputs) != 1 or node.args[0] is not inputs[0]:
                return Miss("not one input")
            return tuple(node.meta["example_value"].shape)

        def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
            x = stack(edit, [node.all_input_nodes[0] for node in group])
            op = op_of(group[0])
            assert op is not None
            out = edit.call(op.name, x, *group[0].args[1:], **group[0].kwargs)
            for node, part in zip(group, unstack(edit, out, len(group)), strict=True):
                edit.replace(node, part)

        @classmethod
        def examples(cls) -> Sequence[Any]:
            return ()

    BatchPointwise.anchors = anchors
    return BatchPointwise()


def merge_equal(anchor: str) -> GroupPattern:
    """Compute equal calls on the same input once."""

    class MergeEqual(GroupPattern):
        anchors = (anchor,)
        family = "vertical"

        def key(self, node: Node) -> Hashable | Miss:
            return tuple(id(n) for n in node.all_input_nodes)

        def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
            for node in group[1:]:
                edit.replace(node, group[0])

        @classmethod
        def examples(cls) -> Sequence[Any]:
            return ()

    return MergeEqual()
