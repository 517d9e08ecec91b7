"""What may not be moved, merged or replaced: tanh is merged over all that can be in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Match
from tests.optimus.capture import names, refused, rewritten
from tests.optimus.handmade import batch_pointwise, local


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator) for _ in range(2)]


@torch.library.custom_op("optimus_tests::double_", mutates_args={"x"})
def double_(x: Tensor) -> None:
    x.mul_(2)


@torch._dynamo.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    """A function that nothing is known of."""
    return x * 1


def written_between(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    x.add_(1)
    return a, torch.tanh(x)


def written_between_through_a_view(x: Tensor, y: Tensor) -> Any:
    row = x[0]
    a = torch.tanh(x)
    row.mul_(2)
    return a, torch.tanh(x)


def each_written(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    x.add_(1)
    y.add_(x)
    return a, torch.tanh(y)


def view_written_between(x: Tensor, y: Tensor) -> Any:
    a, b = torch.split(x, 2, 1)
    c = torch.tanh(a)
    x[:, 3] = 5
    return c, torch.tanh(b)


def assigned_between(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    y[:, 0] = a[:, 0]
    return a, torch.tanh(y)


def written_by_custom_operator(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    double_(x)
    return a, torch.tanh(x)


def written_out(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    torch.add(y, 1, out=x)
    return a, torch.tanh(x)


def written_in_place_activation(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    F.relu(x, inplace=True)
    return a, torch.tanh(x)


def written_detached(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    x.detach().zero_()
    return a, torch.tanh(x)


def result_written(x: Tensor, y: Tensor) -> Any:
    a, b = torch.tanh(x), torch.tanh(y)
    a[0] = 7
    return a, b


def result_written_through_a_view(x: Tensor, y: Tensor) -> Any:
    a, b = torch.tanh(x), torch.tanh(y)
    b.t()[0] += 1
    return a, b


def one_inside_no_grad(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    with torch.no_grad():
        b = torch.tanh(y)
    return a, b


def one_in_each_no_grad(x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        a = torch.tanh(x)
    y = y * 2
    with torch.no_grad():
        b = torch.tanh(y)
    return a, b


def one_inside_autocast(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = torch.tanh(y)
    return a, b


def nested_autocast(x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = torch.tanh(x)
        with torch.autocast("cpu", enabled=False):
            b = torch.tanh(y)
    return a, b


def other_dtype(x: Tensor, y: Tensor) -> Any:
    return torch.tanh(x.double()), torch.tanh(y)


def other_requires_grad(x: Tensor, y: Tensor) -> Any:
    return torch.tanh(x * torch.ones(4, requires_grad=True)), torch.tanh(y)


def dependent(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    return a, torch.tanh(a + y)


def unknown_call_between(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    y = opaque(y)
    return a, torch.tanh(y)


IN_THE_WAY = [
    written_between, each_written, written_between_through_a_view,
    view_written_between, assigned_between,
    written_by_custom_operator, written_out, written_in_place_activation, written_detached,
    result_written, result_written_through_a_view, one_inside_no_grad, one_in_each_no_grad,
    one_inside_autocast, nested_autocast, other_dtype, other_requires_grad, dependent,
    unknown_call_between,
]  # fmt: skip


@pytest.mark.parametrize("program", IN_THE_WAY)
def test_not_merged(program: Callable[..., Any]) -> None:
    refused(program, inputs(), batch_pointwise("tanh"))


def first_can_wait(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    y.add_(1)
    return a, torch.tanh(y)


def written_before(x: Tensor, y: Tensor) -> Any:
    y.add_(1)
    return torch.tanh(x), torch.tanh(y)


def written_after(x: Tensor, y: Tensor) -> Any:
    a, b = torch.tanh(x), torch.tanh(y)
    y.add_(1)
    return a, b


def other_memory_written_between(x: Tensor, y: Tensor) -> Any:
    a, z = torch.tanh(x), torch.zeros(3)
    z[0] = 1
    return a, torch.tanh(y), z


def both_inside_no_grad(x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        a = torch.tanh(x)
        z = a * 2
        return torch.tanh(y), z


def both_inside_autocast(x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = torch.tanh(x @ x.t())
        return a, torch.tanh(y @ y.t())


def view_made_inside_no_grad_of_what_needs_none(x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        z = y.view(3, 4)
    return torch.tanh(x), torch.tanh(z)


def random_between(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x)
    noise = torch.rand(3)
    return a, torch.tanh(y), noise, torch.rand(3)


NOT_IN_THE_WAY = [
    first_can_wait, written_before, written_after,
    other_memory_written_between, both_inside_no_grad,
    both_inside_autocast, view_made_inside_no_grad_of_what_needs_none, random_between,
]  # fmt: skip


@pytest.mark.parametrize("program", NOT_IN_THE_WAY)
def test_merged(program: Callable[..., Any]) -> None:
    module, reports = rewritten(program, inputs(), batch_pointwise("tanh"))
    assert reports["batch_pointwise"].fired == 1
    assert names(module).count("tanh") == 1


def test_inputs_that_share_memory() -> None:
    """Writing to one argument changes the other."""
    x = torch.randn(3, 8)

    def program(x: Tensor, part: Tensor) -> Any:
        a = torch.tanh(x[:, :4])
        part.add_(1)
        return a, torch.tanh(x[:, 4:])

    refused(program, (x, x[:, 4:]), batch_pointwise("tanh"))


def test_random_calls_keep_their_order() -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        a = F.dropout(x, 0.5, True)
        z = torch.rand(3, 4)
        return a, F.dropout(y, 0.5, True), z

    refused(program, inputs(), batch_pointwise("dropout"))


def test_random_call_taken_over_across_another() -> None:
    """A pattern that may replace random calls may still not make them change places."""

    def match(node: Node) -> Match | None:
        second = next(n for n in reversed(node.graph.nodes) if n.target is node.target)
        return Match((node, second)) if second is not node else None

    def rewrite(match: Match, edit: Editor) -> None:
        for node in match.nodes:
            edit.replace(node, edit.call("dropout", *node.args))

    def program(x: Tensor, y: Tensor) -> Any:
        a = F.dropout(x, 0.5, True)
        z = torch.rand(3, 4)
        return a, F.dropout(y, 0.5, True), z

    pattern = local("dropout", match, rewrite, replaces_effects=True)
    assert "draws random numbers in between" in refused(program, inputs(), pattern)


def moved_to_the_split(middle: Callable[[Tensor], Any]) -> tuple[Callable[..., Any], Any]:
    """A program that cuts, does `middle`, and computes; a pattern that computes before it cuts."""

    def program(x: Tensor) -> Any:
        a, b = torch.split(x, 2, 1)
        done = middle(x)
        return torch.tanh(a), torch.tanh(b), done

    def match(node: Node) -> Match | None:
        if node.args[0].op != "placeholder":  # type: ignore[union-attr]
            return None
        items = list(node.users)
        works = [next(iter(item.users)) for item in items]
        return Match((node, *items, *works), values={"works": works})

    def rewrite(match: Match, edit: Editor) -> None:
        whole = edit.call("tanh", match.anchor.args[0])
        parts = edit.call("split", whole, 2, 1)
        for i, work in enumerate(match["works"]):
            edit.replace(work, edit.call("getitem", parts, i))

    return program, local("split", match, rewrite)


def test_work_is_not_carried_to_a_view_in_front_of_a_write() -> None:
    program, pattern = moved_to_the_split(lambda x: x.add_(1))
    reason = refused(program, inputs()[:1], pattern)
    assert reason == "add_ writes to memory of the match"


def test_work_is_carried_to_a_view_where_nothing_is_written() -> None:
    program, pattern = moved_to_the_split(lambda x: x + 1)
    module, reports = rewritten(program, inputs()[:1], pattern)
    assert reports["handmade"].fired == 1
    assert names(module).count("tanh") == 1


def test_fresh_memory_does_not_become_an_alias_that_is_written() -> None:
    """cat(split(x)) is x, but not where one of them is written to."""

    def match(node: Node) -> Match:
        parts = node.args[0]
        assert isinstance(parts, list | tuple)
        cut = parts[0].args[0]  # type: ignore[union-attr]
        return Match((node, *parts, cut), values={"source": cut.args[0]})  # type: ignore

    def rewrite(match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, match["source"])

    def joined_written(x: Tensor) -> Any:
        y = torch.cat(torch.split(x * 1, 2, 1), 1)
        y[0] = 1
        return y, x

    def source_written(x: Tensor) -> Any:
        z = x * 1
        y = torch.cat(torch.split(z, 2, 1), 1)
        z[0] = 1
        return y, z

    def input_returned(x: Tensor) -> Any:
        return torch.cat(torch.split(x, 2, 1), 1), x

    pattern = local("cat", match, rewrite)
    for program in (joined_written, source_written):
        assert "would be shared or copied" in refused(program, inputs()[:1], pattern)
    _, reports = rewritten(input_returned, inputs()[:1], pattern)
    assert reports["handmade"].fired == 1
