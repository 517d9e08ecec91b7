"""Einsums that are one GEMM become linears or bmms."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "lower_einsum_to_gemm"
SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "n": 6, "m": 7}


def operand(labels: str) -> Tensor:
    """A tensor of the sizes that `labels` stand for."""
    return torch.randn([SIZES[label] for label in labels], requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.einsum("bnd,dm->bnm", x, w),
            torch.einsum("bnd,dm->bmn", [x, w]),
            torch.einsum("dm,bnd->bnm", w, x),
            torch.einsum("bnd,bcd->bcn", x, y),
            torch.einsum("...d,dm->...m", x, w),
        )

    inputs = (operand("bnd"), operand("dm"), operand("bcd"))
    assert_expected_inline(
        rewrite(NAME, program, inputs).text,
        """\
transpose = transpose(w, 0, 1)
linear = linear(x, transpose)
transpose_1 = transpose(w, 0, 1)
linear_1 = linear(x, transpose_1)
transpose_2 = transpose(linear_1, 1, 2)
transpose_7 = transpose(transpose_2, 1, 2)
clone = clone(transpose_7, memory_format=torch.contiguous_format)
transpose_8 = transpose(clone, 1, 2)
transpose_3 = transpose(w, 0, 1)
linear_2 = linear(x, transpose_3)
transpose_4 = transpose(y, 1, 2)
bmm = bmm(x, transpose_4)
transpose_5 = transpose(bmm, 1, 2)
clone_1 = clone(transpose_5, memory_format=torch.contiguous_format)
transpose_6 = transpose(w, 0, 1)
linear_3 = linear(x, transpose_6)
return linear, transpose_8, linear_2, clone_1, linear_3""",
    )


GEMMS = ["nd,dm->nm", "nd,dm->mn", "nd,md->nm", "dn,dm->mn", "adn,dm->anm", "dm,nd->nm"]
GEMMS += ["abnd,md->abmn", "nbd,bdm->bnm", "bnd,bdm->nbm", "nd,b...d->...bn", "ndb,bmd->mnb"]


@pytest.mark.parametrize("equation", GEMMS)
def test_gemm(equation: str) -> None:
    one, two = equation.partition("->")[0].split(",")
    inputs = operand(one), operand(two.replace("...", "ac"))
    result = rewrite(NAME, lambda x, y: torch.einsum(equation, x, y), inputs)
    assert result.fired == 1 and "einsum" not in result.text


OTHER = ["nd,nd->n", "n,m->nm", "nd,nd->nd", "nd,dm->n", "nd,d->n", "nd,nm->", "nd,dm"]
OTHER += ["abnd,abmd->abnm", "nnd,dm->nm", "ndc,dcm->nm"]


@pytest.mark.parametrize("equation", OTHER)
def test_other(equation: str) -> None:
    one, two = equation.partition("->")[0].split(",")
    missed(NAME, lambda x, y: torch.einsum(equation, x, y), operand(one), operand(two))


def test_one_and_three_operands() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.einsum("nd->dn", x) + torch.einsum("nd,nm,ne->dm", x, x, x)

    missed(NAME, program, operand("nn").detach())


def test_size_of_one_that_is_stretched() -> None:
    missed(NAME, lambda x, y: torch.einsum("nd,dm->nm", x, y), operand("nd"), torch.randn(1, 7))


def test_integers() -> None:
    x = torch.arange(6).view(2, 3)
    missed(NAME, lambda x: torch.einsum("nd,md->nm", x, x), x)


def test_dynamic_batch() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bnd,bmd->bnm", x, y)

    assert fired(NAME, program, operand("bnd"), operand("bmd"), dynamic=True) == 1


def test_autocast() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.einsum("bnd,bmd->bnm", x, y) + torch.einsum("bnd,md->bnm", x, y[0])

    assert fired(NAME, program, operand("bnd").detach(), operand("bmd").detach()) == 2
