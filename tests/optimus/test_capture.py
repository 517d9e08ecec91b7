"""Names of PyTorch's own that recording rests on, so that a release without them is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optimus.capture import capture_for
from optimus.graphed_call import fixed_inputs


def test_private_names_are_there() -> None:
    assert hasattr(torch._C, "_cuda_endAllocateToPool") or not torch.backends.cuda.is_built()
    assert hasattr(torch.Generator, "graphsafe_set_state")
    assert hasattr(torch.Generator, "clone_state")
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    assert hasattr(optimizer, "_optimizer_step_pre_hooks")
    assert hasattr(optimizer, "_optimizer_step_post_hooks")


@pytest.mark.parametrize("kind", [nn.Linear, nn.BatchNorm1d])
def test_parameters_and_buffers_are_marked_by_dynamo(kind: type[nn.Module]) -> None:
    torch._dynamo.reset()
    found: list[list[bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        found.append(fixed_inputs(graph))
        return graph.forward

    module = nn.Linear(2, 2) if kind is nn.Linear else nn.BatchNorm1d(2)
    torch.compile(module, backend=backend)(torch.ones(4, 2))  # type: ignore[arg-type]
    own = len([*module.parameters(), *module.buffers()])
    assert sorted(found[0]) == [False] + [True] * own


def test_a_cpu_has_none() -> None:
    assert capture_for(torch.device("cpu")) == "there are no CUDA graphs on cpu"
