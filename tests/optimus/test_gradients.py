"""What has no gradient in eager mode (`grad is None`) has none after a rewrite, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from optimus.backend import OptimusBackend
from optimus.editor import Editor, Refused
from optimus.pattern import Match
from tests.optimus.capture import names, refused, rewritten
from tests.optimus.handmade import batch_pointwise, local


def inputs(count: int = 2) -> list[Tensor]:
    return [torch.randn(3, 4, requires_grad=True) for _ in range(count)]


def detached(x: Tensor, y: Tensor) -> Any:
    return torch.tanh(x), torch.tanh(y).detach()


def compared(x: Tensor, y: Tensor) -> Any:
    return torch.tanh(x), torch.tanh(y) > 0


def under_no_grad(x: Tensor, y: Tensor) -> Any:
    a, b = torch.tanh(x), torch.tanh(y)
    with torch.no_grad():
        return a, b * 2


def viewed_under_no_grad(x: Tensor, y: Tensor) -> Any:
    a, b = torch.tanh(x), torch.tanh(y)
    with torch.no_grad():
        c = b.view(-1)
    return a, c * 2


def overwritten(x: Tensor, y: Tensor) -> Any:
    a, b = torch.tanh(x), torch.tanh(y)
    b.fill_(1)
    return a


def unused(x: Tensor, y: Tensor) -> Any:
    b = torch.tanh(y)
    return torch.tanh(x), b.shape[0]


@pytest.mark.parametrize(
    "program", [detached, compared, under_no_grad, viewed_under_no_grad, overwritten, unused]
)
def test_branch_without_gradient_is_not_merged(program: Callable[..., Any]) -> None:
    module, reports = rewritten(program, inputs(), batch_pointwise("tanh"))
    assert reports["batch_pointwise"].fired == 0
    assert "stack" not in names(module)


def test_branches_with_gradients_are_merged() -> None:
    def program(x: Tensor, y: Tensor, z: Tensor) -> Any:
        b = torch.tanh(y)
        b_written = torch.zeros_like(b)
        b_written.copy_(torch.tanh(z))
        return torch.tanh(x) * 2, b.view(-1), b_written

    _, reports = rewritten(program, inputs(3), batch_pointwise("tanh"))
    assert reports["batch_pointwise"].fired == 1


def test_what_is_read_no_more_gets_zeros() -> None:
    """stack([x, y])[0] is x, but y has a gradient of zeros."""

    def match(node: Node) -> Match | None:
        stacked = node.args[0]
        if not isinstance(stacked, Node) or stacked.target is not torch.stack:
            return None
        parts = stacked.args[0]
        assert isinstance(parts, list | tuple)
        return Match((node, stacked), drops=(parts[1],), values={"first": parts[0]})

    def rewrite(match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call(torch.clone, match["first"]))

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([x, y])[0] * 2

    module, reports = rewritten(program, inputs(), local("getitem", match, rewrite))
    assert reports["handmade"].fired == 1
    assert "stack" not in names(module)


def test_gradient_that_eager_does_not_give() -> None:
    """y.detach() has the value of y."""

    def program(x: Tensor, y: Tensor) -> Any:
        return x * y.detach()

    def around(match: Match, edit: Editor) -> None:
        x, detached = match.nodes[0].args
        assert isinstance(detached, Node)
        edit.replace(match.anchor, edit.call("mul", x, detached.args[0]))

    def match(node: Node) -> Match | None:
        other = node.args[1]
        return (
            Match((node, other)) if isinstance(other, Node) and other.op != "placeholder" else None
        )

    with pytest.raises(Refused, match="would get a gradient"):
        rewritten(program, inputs(), local("mul", match, around))


def test_view_made_under_no_grad_stays() -> None:
    """It requires a gradient like its source, but lets none through."""

    def to_source(match: Match, edit: Editor) -> None:
        source = match.anchor.args[0]
        assert isinstance(source, Node)
        edit.replace(match.anchor, source)

    def program(x: Tensor, y: Tensor) -> Any:
        a = x * y
        with torch.no_grad():
            b = a.view(3, 4)
        return b * 2

    reason = refused(program, inputs(), local("reshape", lambda node: Match((node,)), to_source))
    assert reason == "reshape lets no gradient through"


def test_a_gradient_that_leaves_the_callers_no_grad_is_that_of_the_plain_compiler() -> None:
    def part(x: Tensor) -> Tensor:
        part = torch.split(torch.split(x, 4, 1)[1], [2, 1], 0)[1]
        with torch.enable_grad():
            return part.unsqueeze(1)

    x = torch.randn(3, 6, requires_grad=True)
    for patterns in ("none", "all"):
        torch._dynamo.reset()
        backend = OptimusBackend(patterns, inner="aot_eager", strict=True, verify=False)
        compiled = torch.compile(part, backend=backend)  # type: ignore[call-overload]
        with torch.no_grad():
            found = compiled(x)
        assert found.requires_grad
        assert not found.is_leaf, patterns
