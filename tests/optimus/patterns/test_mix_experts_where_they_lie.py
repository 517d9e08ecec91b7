"""Mixtures over runs of experts, each run mixed where it lies."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, rewrite

NAME = "mix_experts_where_they_lie"
SHARED, OWN = torch.randn(3, 4, 5), torch.randn(3, 8, 5)
GATES = torch.randn(3, 2, 6)


def layer(shared: Tensor, own: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    """One of progressive layered extraction: two tasks, four shared experts, two own ones each."""
    common, rest = shared.unbind(1), own.unbind(1)
    mixed = []
    for task, gate in enumerate(gates.unbind(1)):
        experts = torch.stack([*common, *rest[2 * task : 2 * task + 2]], 1)
        mixed.append((gate.unsqueeze(2) * experts).sum(1))
    return tuple(mixed)


def test_golden() -> None:
    assert_expected_inline(
        rewrite(NAME, layer, (SHARED, OWN, GATES)).text,
        """\
unbind_2 = unbind(gates, 1)
x = getitem(unbind_2, 0)
x_1 = getitem(unbind_2, 1)
unsqueeze = unsqueeze(x, 2)
unsqueeze_1 = unsqueeze(x_1, 2)
split = split(unsqueeze, [4, 2], 1)
getitem_8 = getitem(split, 0)
getitem_9 = getitem(split, 1)
mul_2 = mul(getitem_8, shared)
sum_3 = sum(mul_2, 1)
split_1 = split(own, [2, 2, 4], 1)
getitem_10 = getitem(split_1, 0)
getitem_11 = getitem(split_1, 1)
mul_3 = mul(getitem_9, getitem_10)
sum_4 = sum(mul_3, 1)
add = add(sum_3, sum_4)
split_2 = split(unsqueeze_1, [4, 2], 1)
getitem_12 = getitem(split_2, 0)
getitem_13 = getitem(split_2, 1)
mul_4 = mul(getitem_12, shared)
sum_5 = sum(mul_4, 1)
mul_5 = mul(getitem_13, getitem_11)
sum_6 = sum(mul_5, 1)
add_1 = add(sum_5, sum_6)
return add, add_1""",
    )


def test_dynamic_batch() -> None:
    assert fired(NAME, layer, SHARED, OWN, GATES, dynamic=True) == 1


def mixed_by_a_product(shared: Tensor, own: Tensor, gate: Tensor) -> Tensor:
    """A mixture that is alone, as that of all experts for the next layer's shared ones."""
    experts = torch.stack([*shared.unbind(1), *own.unbind(1)[:2]], 1)
    return torch.matmul(gate.unsqueeze(1), experts).squeeze(1)


def test_product() -> None:
    assert_expected_inline(
        rewrite(NAME, mixed_by_a_product, (SHARED, OWN, GATES[:, 0])).text,
        """\
unsqueeze = unsqueeze(gate, 1)
split = split(unsqueeze, [4, 2], 2)
getitem_6 = getitem(split, 0)
getitem_7 = getitem(split, 1)
transpose = transpose(getitem_6, 1, 2)
mul = mul(transpose, shared)
sum_1 = sum(mul, 1, True)
narrow_1 = narrow(own, 1, 0, 2)
transpose_1 = transpose(getitem_7, 1, 2)
mul_1 = mul(transpose_1, narrow_1)
sum_2 = sum(mul_1, 1, True)
add = add(sum_1, sum_2)
squeeze = squeeze(add, 1)
return squeeze""",
    )


def test_product_in_half_precision() -> None:
    """Summed in float32 and rounded once, as a GEMM does it; autocast rounds its factors first."""

    def autocast(shared: Tensor, own: Tensor, gate: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mixed_by_a_product(shared, own, gate)

    half = [x.bfloat16() for x in (SHARED, OWN, GATES[:, 0])]
    assert fired(NAME, mixed_by_a_product, *half) == 1
    assert fired(NAME, autocast, SHARED, OWN, GATES[:, 0]) == 1


def test_several_rows_stay() -> None:
    def program(shared: Tensor, own: Tensor, gates: Tensor) -> Tensor:
        experts = torch.stack([*shared.unbind(1), *own.unbind(1)[:2]], 1)
        return torch.matmul(gates, experts)

    assert fired(NAME, program, SHARED, OWN, GATES) == 0


def test_expert_kept_beside_the_mixture_stays() -> None:
    def program(shared: Tensor, own: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        experts = torch.stack([*shared.unbind(1), *own.unbind(1)[:2]], 1)
        return (gate.unsqueeze(2) * experts).sum(1), experts

    assert fired(NAME, program, SHARED, OWN, GATES[:, 0]) == 0


def test_experts_of_many_tensors_stay() -> None:
    def program(x: Tensor, gate: Tensor) -> Tensor:
        experts = torch.stack([x.sin(), x.cos(), x.tanh(), x.exp(), x.relu(), x.abs()], 1)
        return (gate.unsqueeze(2) * experts).sum(1)

    assert fired(NAME, program, torch.randn(3, 5), GATES[:, 0]) == 0


def test_sum_over_the_features_stays() -> None:
    def program(shared: Tensor, own: Tensor, gate: Tensor) -> Tensor:
        experts = torch.stack([*shared.unbind(1), *own.unbind(1)[:2]], 1)
        return (gate.unsqueeze(2) * experts).sum(2)

    assert fired(NAME, program, SHARED, OWN, GATES[:, 0]) == 0


def test_weights_that_are_no_weights_per_expert_stay() -> None:
    def program(shared: Tensor, own: Tensor, gate: Tensor) -> Tensor:
        experts = torch.stack([*shared.unbind(1), *own.unbind(1)[:2]], 1)
        return (gate * experts).sum(1)

    assert fired(NAME, program, SHARED, OWN, torch.randn(1, 1)) == 0
