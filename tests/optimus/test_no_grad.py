"""What no_grad makes of a value that requires a gradient stays what it is.

A view made there requires a gradient and passes none on; a call that has nothing to do gives back
the very tensor, with its gradient; a copy requires none. So no rewrite may turn one into another,
be it by what stands for the value or by how that is laid out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.optimus.adversarial.graphs import Case, check
from tests.optimus.patterns.rewriting import missed, rewrite

VIEWS = """
    {0}[..., :2]; {0}[:, :2]; {0}[:, :1]; {0}.view(-1, 2); {0}.view(-1); {0}.reshape(2, -1);
    {0}.view_as({0}); {0}.as_strided((4, 2), (2, 1)); {0}.unflatten(1, (2, 1)); {0}.expand(4, 2);
    {0}.unsqueeze(0).squeeze(0); {0}.t().t(); {0}.t(); {0}.split(2, 1)[0]; {0}.chunk(2, 1)[1];
    {0}.unbind(1)[0]
"""
NOTHING_DONE = "{0}.contiguous(); {0}.float(); {0}.to({0}.device); {0}.flatten(1); {0}.type_as({0})"
COPIES = """
    torch.cat([{0}], 1); torch.cat({0}.split(1, 1), 1); torch.stack({0}.unbind(1), 1);
    torch.cat([{0}, {0}], 1).split(2, 1)[0]; torch.stack([{0}, {0}]).unbind()[0]; {0} * 2
"""
VALUES = [text.strip() for text in f"{VIEWS}; {NOTHING_DONE}; {COPIES}".split(";")]
SOURCES: dict[str, Callable[[Any, Tensor], tuple[Tensor, Tensor]]] = {
    "linears": lambda m, x: (m.l[0](x), m.l[1](x)),
    "activations": lambda m, x: (torch.relu(m.l[0](x)), torch.relu(m.l[1](x + 1))),
    "twins": lambda m, x: (torch.relu(m.l[0](x)), torch.relu(m.l[0](x))),
}


def linears() -> dict[str, Any]:
    return {"l": nn.ModuleList(nn.Linear(6, 2) for _ in range(2))}


def checked(program: Callable[[Any, Tensor], Any], mode: str = "train") -> None:
    check(Case("program", program, ((4, 6),), linears, (mode,), coarse=False), mode)


def taken(value: str) -> Callable[[Tensor], Any]:
    """The function of a tensor that the text is."""
    function: Callable[[Tensor], Any] = eval(f"lambda t: {value.format('t')}", {"torch": torch})
    return function


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("value", VALUES)
def test_value_made_under_no_grad(value: str, source: str) -> None:
    """Returned, or read where gradients are on, beside the same value made outside."""
    take = taken(value)

    def program(m: Any, x: Tensor) -> Any:
        a, b = SOURCES[source](m, x)
        outside = take(a)
        with torch.no_grad():
            c, d = take(a), take(b)
        return c, torch.tanh(d), outside * 2

    checked(program)


@pytest.mark.parametrize("nothing_done", NOTHING_DONE.split("; "))
@pytest.mark.parametrize("stopped", ["{0}[:, :2]", "{0} * 2", "{0}.detach()"])
def test_tensor_given_back_has_a_gradient_beside_one_without(
    nothing_done: str, stopped: str
) -> None:
    """Merged with the layer that has none, that one would have zeros."""

    def program(m: Any, x: Tensor) -> Any:
        a, b = SOURCES["activations"](m, x)
        with torch.no_grad():
            c, d = taken(nothing_done)(a), taken(stopped)(b)
        return torch.tanh(c), torch.tanh(d)

    checked(program)


@pytest.mark.parametrize("value", ["{0}[..., :2]", "{0}.contiguous()", "{0}.view(-1)"])
def test_views_are_compiled_as_without_patterns(value: str) -> None:
    def program(m: Any, x: Tensor) -> Any:
        a, b = SOURCES["linears"](m, x)
        with torch.no_grad():
            c, d = taken(value)(a), taken(value)(b)
        return torch.tanh(c), d.sum(), a * 2

    checked(program, "aot")


def test_one_rewrite_is_refused_and_the_others_are_made() -> None:
    x, w, v = (torch.randn(4, 6, requires_grad=True) for _ in range(3))

    def program(x: Tensor, w: Tensor, v: Tensor) -> Any:
        a, b = F.linear(x, w), F.linear(x, v)
        with torch.no_grad():
            c, d = a.view(-1), b.view(-1)
        return c, d, torch.relu(x).contiguous() + torch.relu(x)

    reason = missed("widen_shared_input_linears", program, x, w, v)
    assert reason == "linear must stay as it is laid out"
    assert rewrite("remove_noops", program, (x, w, v)).fired == 1
    assert rewrite("merge_duplicates", program, (x, w, v)).fired == 1


def test_what_is_read_under_no_grad_alone_is_no_reason() -> None:
    """As a metric is computed inside of a model."""
    x, w, v = (torch.randn(4, 6, requires_grad=True) for _ in range(3))

    def program(x: Tensor, w: Tensor, v: Tensor) -> Any:
        a, b = F.linear(x, w), F.linear(x, v)
        with torch.no_grad():
            mean = a.view(-1).mean()
        return a, b, mean

    assert rewrite("widen_shared_input_linears", program, (x, w, v)).fired == 1
