"""L2 norms of parts of one tensor become one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "batch_normalizes"
X = torch.randn(5, 12, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([F.normalize(part, 1.0, -1, 1e-6) for part in x.split(4, 1)], 1)

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
normalize_3 = normalize(unflatten, 1.0, 2, 1e-06)
unbind = unbind(normalize_3, 1)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
getitem_2 = getitem(unbind, 2)
stack = stack([getitem, getitem_1, getitem_2], 1)
return stack""",
    )


def test_zeros() -> None:
    """A part of length zero does not touch its neighbours."""

    def program(x: Tensor) -> Tensor:
        x = torch.cat([x[:, :4], x[:, 4:8] * 0, x[:, 8:]], 1)
        return torch.stack([F.normalize(part) for part in x.split(4, 1)], 1)

    assert fired(NAME, program, X) == fired(NAME, program, X, dynamic=True) == 1


def test_other() -> None:
    missed(NAME, lambda x: F.normalize(x[:, :4]) + F.normalize(x[:, 4:8], 1.0), X)
    missed(NAME, lambda x: F.normalize(x[:, :4]) + F.normalize(x[:, 4:8], eps=1e-3), X)
    missed(NAME, lambda x: F.normalize(x[:, :4]) + F.normalize(x[:, 4:8], dim=0), X)
    missed(NAME, lambda x: F.normalize(x[:, :4], dim=(0, 1)) + F.normalize(x[:, 4:8]), X)
