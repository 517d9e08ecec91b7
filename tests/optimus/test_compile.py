"""`optimus.compile`, and the backend by its name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import optimus


@pytest.mark.parametrize("kind", ["linear", "sequential"])
def test_a_module_is_compiled_in_place(kind: str) -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 3) if kind == "linear" else nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    twin = copy.deepcopy(model)
    keys = list(model.state_dict())
    assert optimus.compile(model, inner="aot_eager") is model
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), twin(x))
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(copy.deepcopy(model)(x), twin(x))


def test_a_function_is_compiled() -> None:
    torch._dynamo.reset()
    run = optimus.compile(lambda x: torch.relu(x) + 1, inner="aot_eager")
    x = torch.randn(3)
    assert torch.equal(run(x), torch.relu(x) + 1)


def test_the_backend_has_a_name() -> None:
    torch._dynamo.reset()
    options = {"patterns": "all", "inner": "aot_eager"}
    run = torch.compile(lambda x: torch.relu(x) + 1, backend="optimus", options=options)
    x = torch.randn(3)
    assert torch.equal(run(x), torch.relu(x) + 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"patterns": "batch_lineers"}, "batch_linears"),
        ({"patterns": ["all", "vertcal"]}, "vertical"),
        ({"disable": ["batch_linearz"]}, "batch_linears"),
        ({"knobs": {"batch_linears": {"size": 3}}}, "batch_linears"),
        ({"inner": "inductr"}, "inductor"),
        ({"inner_options": {"max_autotun": True}}, "max_autotune"),
        ({"inner": "eager", "inner_options": {"max_autotune": True}}, "takes none"),
    ],
)
def test_what_is_misspelt_is_refused_and_the_nearest_named(
    arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        optimus.compile(nn.Linear(2, 2), **arguments)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    compiled = torch.compile(torch.relu, backend="optimus", options={"pattern": "all"})
    with pytest.raises(Exception, match="unknown option 'pattern'; nearest valid: patterns"):
        compiled(torch.ones(2))
