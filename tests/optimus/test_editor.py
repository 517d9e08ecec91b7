"""Rewrites that the editor must refuse, whatever their pattern claims."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Match, Miss
from tests.optimus.capture import names, refused, rewritten
from tests.optimus.handmade import local, merge_equal

X = torch.randn(3, 4)


def relu(x: Tensor) -> Tensor:
    """The smallest program."""
    return torch.relu(x)


def whole(node: Node) -> Match:
    """Just the anchor."""
    return Match((node,))


def test_change_of_type() -> None:
    def to_double(match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call(Tensor.double, match.anchor.args[0]))

    reason = refused(relu, (X,), local("relu", whole, to_double))
    assert reason == "would change the type of relu"


def test_change_of_shape() -> None:
    def flat(match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call("flatten", match.anchor.args[0]))

    reason = refused(relu, (X,), local("relu", whole, flat))
    assert reason == "would change the type of relu"


def test_change_of_requires_grad() -> None:
    def detached(match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call("detach", match.anchor.args[0]))

    x = X.clone().requires_grad_()
    reason = refused(relu, (x,), local("relu", whole, detached))
    assert reason == "would change the type of relu"


def test_call_that_fails_on_its_inputs() -> None:
    def nonsense(match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call("reshape", match.anchor.args[0], (5, 5)))

    reason = refused(relu, (X,), local("relu", whole, nonsense))
    assert "reshape fails here" in reason


def test_replacing_a_node_outside_the_match() -> None:
    def other(match: Match, edit: Editor) -> None:
        user = next(iter(match.anchor.users))
        edit.replace(user, edit.call("relu", match.anchor.args[0]))

    reason = refused(lambda x: torch.tanh(torch.relu(x)), (X,), local("relu", whole, other))
    assert reason == "replaces tanh, which is outside its match"


def test_ignoring_an_input() -> None:
    def match(node: Node) -> Match | None:
        first = node.args[0]
        return Match((node,)) if isinstance(first, Node) and first.op != "placeholder" else None

    def skip(match: Match, edit: Editor) -> None:
        source = match.anchor.args[0].args[0]  # the tanh between is left out
        edit.replace(match.anchor, edit.call("relu", source))

    pattern = local("relu", match, skip)
    reason = refused(lambda x: torch.relu(torch.tanh(x)), (X,), pattern)
    assert reason.startswith("the result depends on tanh, which the replacement ignores")


def test_reading_what_it_replaces() -> None:
    def around(match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call(torch.clone, match.anchor))

    reason = refused(lambda x: torch.relu(x) + 1, (X,), local("relu", whole, around))
    assert reason == "the replacement of relu reads relu"


def test_reading_what_depends_on_it() -> None:
    def backwards(match: Match, edit: Editor) -> None:
        user = next(iter(match.anchor.users))
        edit.replace(match.anchor, edit.call("clamp", user, 0))

    reason = refused(lambda x: torch.relu(x) + 1, (X,), local("relu", whole, backwards))
    assert reason == "the replacement reads add, which is computed after its place"


def test_reading_what_is_computed_later() -> None:
    def match(node: Node) -> Match:
        later = next(n for n in node.graph.nodes if n.name == "tanh")
        return Match((node, later), values={"later": later})

    def rewrite(match: Match, edit: Editor) -> None:
        later = match["later"]
        edit.replace(later, edit.call("tanh", later.args[0]))

    def program(x: Tensor) -> Tensor:
        y = torch.relu(x)
        return torch.tanh(y.sigmoid()) + y

    reason = refused(program, (X,), local("relu", match, rewrite))
    assert reason == "the replacement reads sigmoid, which is computed after its place"


def test_replacing_what_is_read_before_the_place() -> None:
    def match(node: Node) -> Match | None:
        first = node.args[0]
        if not isinstance(first, Node) or first.op == "placeholder":
            return None
        return Match((node, first), values={"first": first})

    def rewrite(match: Match, edit: Editor) -> None:
        both = edit.call("relu", match["first"].args[0])
        edit.replace(match["first"], both)

    def program(x: Tensor) -> Tensor:
        y = torch.relu(x)
        z = torch.tanh(y)
        return torch.relu(y) + z

    reason = refused(program, (X,), local("relu", match, rewrite))
    assert reason.endswith("relu is read before the place of its replacement")


def test_new_nodes_with_effects() -> None:
    def in_place(match: Match, edit: Editor) -> None:
        copied = edit.call(torch.clone, match.anchor.args[0])
        edit.replace(match.anchor, edit.call(torch.relu_, copied))

    reason = refused(relu, (X,), local("relu", whole, in_place))
    assert reason == "relu_ would write to memory or draw random numbers"


def test_dropping_the_value_of_a_write() -> None:
    def forget(match: Match, edit: Editor) -> None:
        edit.call("relu", match.anchor.args[0])

    def program(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, True) + 1

    pattern = local("dropout", whole, forget, replaces_effects=True)
    assert refused(program, (X,), pattern) == "dropout is still read but not replaced"


def test_refusal_leaves_the_graph_as_it_was() -> None:
    def to_double(match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call(Tensor.double, match.anchor.args[0]))

    module, _ = rewritten(lambda x: torch.relu(x) + 1, (X,), local("relu", whole, to_double))
    assert names(module) == ["relu", "add"]


class TestMergingEqualValues:
    """One value in the place of two must be seen as shared by all that looks at either."""

    def test_plain(self) -> None:
        module, reports = rewritten(
            lambda x: torch.relu(x) * torch.relu(x), (X,), merge_equal("relu")
        )
        assert names(module) == ["relu", "mul"]
        assert reports["merge_equal"].fired == 1

    def test_returned_both(self) -> None:
        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.relu(x), torch.relu(x)

        rewritten(program, (X,), merge_equal("relu"))

    def test_returned_through_views(self) -> None:
        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            a = torch.relu(x)
            view = a.view(-1)
            return view, torch.relu(x)

        rewritten(program, (X,), merge_equal("relu"))

    def test_both_returned_through_views(self) -> None:
        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = torch.relu(x), torch.relu(x)
            return a.view(-1), b.view(2, 6)

        rewritten(program, (X,), merge_equal("relu"))

    def test_first_is_written(self) -> None:
        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = torch.relu(x), torch.relu(x)
            a[:, 0] = 7
            return a, b

        reason = refused(program, (X,), merge_equal("relu"))
        assert reason == "setitem writes to memory that would be shared or copied"

    def test_second_is_written_through_a_view(self) -> None:
        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = torch.relu(x), torch.relu(x)
            b.view(-1)[0] = 7
            return a, b

        reason = refused(program, (X,), merge_equal("relu"))
        assert reason == "setitem writes to memory that would be shared or copied"

    def test_a_new_value_for_two(self) -> None:
        def match(node: Node) -> Match | Miss:
            twins = [n for n in node.args[0].users if n.target is node.target]  # type: ignore[union-attr]
            return Match((node, *twins[1:])) if len(twins) == 2 and node is twins[0] else Miss("no")

        def rewrite(match: Match, edit: Editor) -> None:
            once = edit.call("relu", match.anchor.args[0])
            for node in match.nodes:
                edit.replace(node, once)

        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = torch.relu(x), torch.relu(x)
            a[:, 0] = 7
            return a, b

        reason = refused(program, (X,), local("relu", match, rewrite))
        assert reason.startswith("setitem writes to memory that would be shared or copied")


def test_views_made_one_by_one_are_not_cut_by_one_call() -> None:
    """PyTorch tracks the parts of split together, those of tensor_split each by itself."""

    def to_split(match: Match, edit: Editor) -> None:
        edit.respell(
            match.anchor, "split", tensor=match.anchor.args[0], split_size_or_sections=2, dim=1
        )

    def written(x: Tensor) -> Tensor:
        y = x * 1
        a, _ = torch.tensor_split(y, 2, 1)
        a.add_(1)
        return y * 2

    def returned(x: Tensor) -> Tensor:
        return torch.tensor_split(x, 2, 1)[0]

    pattern = local("tensor_split", whole, to_split)
    assert "cut by one call" in refused(written, (X,), pattern)
    assert "cut by one call" in refused(returned, (X,), pattern)
    _, reports = rewritten(lambda x: torch.tensor_split(x, 2, 1)[0] * 2, (X,), pattern)
    assert reports["handmade"].fired == 1
