"""Operators made in Python, and what they refuse."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from kernels.batched_norm import batched_norm
from kernels.cross_layer import low_rank_cross_layer
from kernels.descriptors import has_tma
from kernels.dot_interaction import dot_interaction
from kernels.fused_mlp import fused_mlp
from kernels.gated_linear import gated_linear
from kernels.linear_act import linear_act
from kernels.operators import _stand_in, operator
from kernels.tuning import pinned, tile
from tests.kernels import checks

SEEN = {
    "dot_interaction": (dot_interaction, [(64, 16), (64, 5, 16)]),
    "cross_layer": (low_rank_cross_layer, [(64, 96), (64, 96), (32, 96), (96, 32), (96,)]),
    "batched_norm": (batched_norm, [(64, 8, 32), (8, 32), (8, 32)]),
    "fused_mlp": (
        lambda x, a, b, c, d: fused_mlp(x, [a, b], [c, d]),
        [(64, 13), (32, 13), (16, 32), (32,), (16,)],
    ),
    "gated_linear": (gated_linear, [(64, 48), (96, 48), (96, 48)]),
    "linear_act": (linear_act, [(64, 48), (96, 48), (96,)]),
}
"""Operators that the compiler sees into, with shapes of inputs; the first 64 is the batch."""

COPIES = {
    "cross_layer": ["cross_layer_fwd", "cross_layer_bwd"],
    "gated_linear": ["gated_linear"],
    "linear_act": ["linear_act_fwd"],
}
"""Of these, those whose kernels can copy by TMA."""


@operator("tests_double", differentiable=False)
def _double(x: Tensor, times: int) -> Tensor:
    return x * 2 * times


@_double.register_fake
def _(x: Tensor, times: int) -> Tensor:
    return torch.empty_like(x)


def _compiled(x: Tensor) -> Tensor:
    return torch.compile(lambda x: _double(x, 3), backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("call", [lambda x: _double(x, 3), _compiled])
def test_one_without_a_gradient_says_so(call: checks.Function) -> None:
    assert call(torch.ones(2)).tolist() == [6.0, 6.0]
    with pytest.raises(Exception, match="kernels::tests_double has no gradient"):
        call(torch.ones(2, requires_grad=True)).sum().backward()


def test_it_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.kernels.tests_double.default, (torch.ones(2), 3))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 8),
        torch.zeros(5, 9)[1:, 2:],
        torch.zeros(4, 6).T,
        torch.zeros(1, 8).expand(3, 8),
        torch.zeros(3, 0),
    ],
)
def test_tiles_are_chosen_on_tensors_that_lie_as_the_traced_ones(tensor: Tensor) -> None:
    """Which tiles there are depends on sizes, strides and where in 16 bytes a tensor begins."""
    like = _stand_in(tensor)
    assert (like.shape, like.stride(), like.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert (like.storage_offset() - tensor.storage_offset()) * tensor.itemsize % 16 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SEEN)
def test_inductor_launches_the_kernels_itself(name: str, dynamic: bool) -> None:
    """No call of an operator is left in its code, forward or backward."""
    _check_code_of_inductor(name, dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_inductor_makes_descriptors_for_them(name: str, dynamic: bool) -> None:
    from torch._inductor import config as inductor_config

    if not has_tma(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs a GPU that copies by TMA")
    with ExitStack() as stack:
        # Code in a cache may be from another choice of tiles.
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        for kernel in COPIES[name]:
            copying = tile(TMA=1, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)
            stack.enter_context(pinned(kernel, copying))
        codes = _check_code_of_inductor(name, dynamic)
    assert any("TensorDescriptor" in code for code in codes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEEN)
def test_is_right_where_pytorch_may_use_tf32(name: str) -> None:
    op, shapes = SEEN[name]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        checks.against_definition(op, [torch.randn(shape, device="cuda") for shape in shapes])
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEEN)
def test_a_tensor_of_over_two_to_31_numbers(name: str) -> None:
    """The last rows of a long batch are what a short batch of these rows gives; up to 15 GB."""
    op, shapes = SEEN[name]
    longest = max(torch.Size(shape[1:]).numel() for shape in shapes if shape[0] == 64)
    batch = 2**31 // longest + 64
    inputs = []
    for shape in shapes:
        size = (batch, *shape[1:]) if shape[0] == 64 else shape
        inputs.append(torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_())
    assert max(x.numel() for x in inputs) > 2**31
    with torch.no_grad():
        found = op(*inputs)[-64:].clone()
        short = op(*(x[-64:].clone() if len(x) == batch else x for x in inputs))
        assert (found - short).norm() <= 0.01 * short.norm()


def _check_code_of_inductor(name: str, dynamic: bool) -> list[str]:
    from torch._inductor.utils import run_and_get_code

    op, shapes = SEEN[name]
    seen: list[str] = []
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic)
    for batch in (64, 100) if dynamic else (64,):
        sizes = [[batch if size == 64 else size for size in shape] for shape in shapes]
        inputs = [torch.randn(size, device="cuda").bfloat16() for size in sizes]
        found, codes = run_and_get_code(checks.run, compiled, inputs)
        seen += codes
        assert not any("torch.ops.kernels" in code for code in codes)
        for one, other in zip(found, checks.run(op, inputs), strict=True):
            assert (one - other).norm() <= 0.02 * other.norm()
    return seen
