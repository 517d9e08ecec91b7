"""The contract between a rewrite and the engine.

A pattern says what it looks for and what to put there. It is a frozen dataclass whose fields are
its knobs; `match` or `key` read the graph and answer with a `Miss` when something is in the way;
`rewrite` builds the replacement through the `Editor`. Everything that must hold for any rewrite
(memory, grad mode, autocast, randomness, order, shapes and types) is checked by the engine.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch.fx import Node

if TYPE_CHECKING:
    from optimus.editor import Editor

Family = Literal["normalize", "vertical", "horizontal", "kernels"]


@dataclass(frozen=True)
class Miss:
    """Why an anchor does not fire: a reason in lower case, without the node's name."""

    reason: str


@dataclass(frozen=True)
class Match:
    """What a rewrite would replace.

    `nodes`: every node whose work the replacement takes over, the anchor first. Inputs of these
    that are not among them stay inputs of the replacement, or stand in `drops` if the result does
    not depend on them. `values`: whatever `rewrite` needs to know, as `match` found it.
    """

    nodes: tuple[Node, ...]
    drops: tuple[Node, ...] = ()
    values: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def anchor(self) -> Node:
        """The node the match started from."""
        return self.nodes[0]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class Example:
    """A program for tests, docs and micro-benchmarks.

    `build` returns a module and its inputs; `fires` is how often the pattern alone (after the
    normalisations it needs) must fire on it, 0 for a near-miss. `exact`: forward and gradients must
    be bitwise what they were, because only views and copies move.
    """

    name: str
    build: Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]
    fires: int
    exact: bool = False
    train: bool = True


class Rewrite(ABC):
    """What `Pattern` and `GroupPattern` share."""

    anchors: ClassVar[tuple[str, ...]]
    """Names of the operations (optimus.ops) that it starts from."""
    family: ClassVar[Family]
    replaces_effects: ClassVar[bool] = False
    """Whether it takes over writes or random draws of the nodes it replaces."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of patterns that make what it looks for, where that is not plain PyTorch. Where one of
    them is not selected and this one never fires, the report says so."""

    in_presets: ClassVar[bool] = True
    """Whether presets select it; where not, it has to be named (and its text says why)."""

    @classmethod
    @cache
    def name(cls) -> str:
        """The one name: that of the pattern's file."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def ungated(self) -> Self:
        """The same without a decision by measurement: what its examples are run with."""
        return self

    def gradient_error(self) -> float:
        """How far a gradient may be off on purpose, relative to its norm.

        A pattern with more than 0 is approximate: no preset selects it, and where it fires the
        error is measured on the real inputs and reported. Values must stay what they are.
        """
        return 0.0

    @classmethod
    @abstractmethod
    def examples(cls) -> Sequence[Example]:
        """At least one program that fires and one near-miss."""


class Pattern(Rewrite):
    """A local rewrite: one anchor and what hangs on it."""

    @abstractmethod
    def match(self, node: Node) -> Match | Miss:
        """What to replace around `node`, one of `anchors`; the graph is only read."""

    @abstractmethod
    def rewrite(self, match: Match, edit: Editor) -> None:
        """Build the replacement in front of the anchor."""


EVERY_CALL = ("*",)
"""As `anchors`: every call in the graph, listed in optimus.ops or not."""


class SweepPattern(Rewrite):
    """A rewrite of nodes that have something in common, found by one walk over all anchors.

    For what costs nothing to move: unlike a group's, the members may depend on one another.
    """

    loner: ClassVar[str]
    """Why a node that stands in no match does not fire."""

    @abstractmethod
    def matches(self, nodes: Sequence[Node]) -> Iterator[Match]:
        """What to replace, the anchor of each match being its first node in the graph or the place
        for the replacement. `nodes`: all anchors under one grad mode and autocast state, in graph
        order. A match is rewritten, or refused, before the next is asked for."""

    @abstractmethod
    def rewrite(self, match: Match, edit: Editor) -> None:
        """Build the replacement in front of the anchor."""


class GroupPattern(Rewrite):
    """A rewrite of independent nodes with equal keys, found over the whole graph."""

    smallest_group: ClassVar[int] = 2
    optional: ClassVar[tuple[str, ...]] = ()
    """Arguments that members may differ in having or not."""
    misfit: ClassVar[str] = "its inputs do not lie beside those of others"
    """Why a node that `arrange` leaves without company does not fire."""

    @abstractmethod
    def key(self, node: Node) -> Hashable | Miss:
        """What members of one group have in common beyond operation, types and context."""

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        """Split and order a group before it is rewritten (graph order as given)."""
        return [group]

    def also(self, node: Node) -> Sequence[Node]:
        """Nodes in front of a member whose work the replacement takes over with it."""
        return ()

    def copies(self, group: Sequence[Node]) -> bool:
        """Whether the replacement copies inputs, so that it had better wait until nothing else
        changes the graph."""
        return False

    @abstractmethod
    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        """Build the replacement of all members in front of the first."""
