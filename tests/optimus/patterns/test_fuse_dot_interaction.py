"""DLRM's interaction becomes one call, other products stay."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torchrec.models.dlrm import InteractionArch

from optimus.patterns.kernels.fuse_dot_interaction import FuseDotInteraction
from tests.optimus.patterns.kernels import fuse, missed

DENSE, EMBEDDED = torch.randn(4, 8), torch.randn(4, 3, 8, requires_grad=True)
PAIRS = torch.triu_indices(4, 4, 1)


def _interact(dense: Tensor, embedded: Tensor, pairs: Tensor) -> Tensor:
    vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat((dense, products[:, pairs[0], pairs[1]]), 1)


def test_golden() -> None:
    result = fuse(FuseDotInteraction(), _interact, (DENSE, EMBEDDED, PAIRS))
    assert_expected_inline(
        result.text,
        """\
unbind = unbind(pairs)
getitem_3 = getitem(unbind, 0)
getitem_4 = getitem(unbind, 1)
dot_interaction_at_default = dot_interaction_at.default(dense, embedded, getitem_3, getitem_4)
return dot_interaction_at_default""",
    )


def test_torchrec() -> None:
    result = fuse(FuseDotInteraction(), InteractionArch(3), (DENSE, EMBEDDED))
    assert result.fired == 1
    assert "bmm" not in result.text


def test_any_pairs_keep_their_meaning() -> None:
    """The pattern does not know the indices; the operator looks at them."""
    pairs = torch.tensor([[0, 3, 3], [0, 1, 1]])
    assert fuse(FuseDotInteraction(), _interact, (DENSE, EMBEDDED, pairs)).fired == 1


def test_dynamic_batch() -> None:
    assert fuse(FuseDotInteraction(), InteractionArch(3), (DENSE, EMBEDDED), True).fired == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype: torch.dtype) -> None:
    def program(dense: Tensor, embedded: Tensor, pairs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _interact(dense, embedded, pairs)

    inputs = (DENSE.to(dtype), EMBEDDED.detach().to(dtype), PAIRS)
    assert fuse(FuseDotInteraction(), program, inputs).fired == 1


def _squares(dense: Tensor, embedded: Tensor, pairs: Tensor) -> Tensor:
    vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat((dense, products[:, pairs[0], pairs[1]]), 1) + products.sum()


def _other_dense(dense: Tensor, embedded: Tensor, pairs: Tensor) -> Tensor:
    vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat((dense.relu(), products[:, pairs[0], pairs[1]]), 1)


def _other_product(dense: Tensor, embedded: Tensor, pairs: Tensor) -> Tensor:
    vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
    products = torch.bmm(vectors, vectors.relu().transpose(1, 2))
    return torch.cat((dense, products[:, pairs[0], pairs[1]]), 1)


def _rows(dense: Tensor, embedded: Tensor, pairs: Tensor) -> Tensor:
    vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat((dense, products[pairs[0], pairs[1], :]), 0 if len(dense) > 9 else 1)


@pytest.mark.parametrize("program", [_squares, _other_dense, _other_product])
def test_other(program: object) -> None:
    assert callable(program)
    missed(FuseDotInteraction(), program, DENSE, EMBEDDED, PAIRS)


def test_other_dimension_of_the_products() -> None:
    pairs = torch.zeros(2, 4, dtype=torch.int64)
    missed(FuseDotInteraction(), _rows, DENSE, EMBEDDED, pairs)
