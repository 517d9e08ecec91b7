"""BatchNorms of features of their own become one."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from optimus.testing import check_program
from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "batch_batch_norms"
X = torch.randn(5, 12, requires_grad=True)
F = torch.nn.functional


def test_in_training() -> None:
    """The running statistics are updated together and written back."""

    def program(x: Tensor, mean: list[Tensor], var: list[Tensor]) -> Tensor:
        parts = zip(x.split([5, 7], 1), mean, var, strict=True)
        norms = [F.batch_norm(p, m, v, training=True, momentum=0.3) for p, m, v in parts]
        return torch.cat(norms[::-1], 1)

    mean, var = [torch.randn(5), torch.randn(7)], [torch.rand(5), torch.rand(7)]
    result = rewrite(NAME, program, (X.detach(), mean, var))
    assert_expected_inline(
        result.text,
        """\
cat_1 = cat([mean_0, mean_1])
cat_2 = cat([var_0, var_1])
batch_norm_2 = batch_norm(x, cat_1, cat_2, None, None, True, 0.3)
split_1 = split(cat_1, [5, 7])
getitem = getitem(split_1, 0)
getitem_1 = getitem(split_1, 1)
copy = copy_(mean_0, getitem)
copy__1 = copy_(mean_1, getitem_1)
split_2 = split(cat_2, [5, 7])
getitem_2 = getitem(split_2, 0)
getitem_3 = getitem(split_2, 1)
copy__2 = copy_(var_0, getitem_2)
copy__3 = copy_(var_1, getitem_3)
split_3 = split(batch_norm_2, [5, 7], 1)
getitem_4 = getitem(split_3, 0)
getitem_5 = getitem(split_3, 1)
cat = cat([getitem_5, getitem_4], 1)
return cat""",
    )


def test_read_in_between() -> None:
    """Statistics that are read or written between two BatchNorms keep them apart."""

    def read(x: Tensor, mean: list[Tensor], var: list[Tensor]) -> Tensor:
        one = F.batch_norm(x[:, :4], mean[0], var[0], training=True)
        seen = mean[0] + 1
        two = F.batch_norm(x[:, 4:8], mean[1], var[1], training=True)
        return torch.cat([one, two]) + seen

    def depends(x: Tensor, mean: list[Tensor], var: list[Tensor]) -> Tensor:
        one = F.batch_norm(x[:, :4], mean[0], var[0], training=True)
        two = F.batch_norm(x[:, 4:8] + mean[0], mean[1], var[1], training=True)
        return torch.cat([one, two])

    def shared(x: Tensor, mean: list[Tensor], var: list[Tensor]) -> Tensor:
        parts = x.split(4, 1)
        return torch.cat([F.batch_norm(p, mean[0], var[0], training=True) for p in parts])

    def momentum(x: Tensor, mean: list[Tensor], var: list[Tensor]) -> Tensor:
        one = F.batch_norm(x[:, :4], mean[0], var[0], training=True, momentum=0.1)
        return one + F.batch_norm(x[:, 4:8], mean[1], var[1], training=True, momentum=0.2)

    stats = [torch.randn(4) for _ in range(2)], [torch.rand(4) for _ in range(2)]
    assert fired(NAME, read, X.detach(), *stats) <= 1
    for program in (depends, shared, momentum):
        missed(NAME, program, X.detach(), *stats)


def test_of_batched_linears() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
            self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            towers = zip(self.linears, self.norms, x.split(4, 1), strict=True)
            return torch.cat([norm(linear(p)).relu() for linear, norm, p in towers], 1)

    for train in (True, False):
        for dynamic in (False, True):
            report = check_program(Towers().train(train), (torch.randn(6, 12),), dynamic=dynamic)
            assert report.fired(NAME) == report.fired("batch_pointwise") == 1
