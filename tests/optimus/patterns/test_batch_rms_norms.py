"""RMSNorms of parts of one tensor become one."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from optimus.testing import check_program
from tests.optimus.patterns.rewriting import rewrite

NAME = "batch_rms_norms"
F = torch.nn.functional


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norms(affine: bool) -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(4, elementwise_affine=affine) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            parts = zip(self.norms, x.unflatten(1, (3, 4)).unbind(1), strict=True)
            return torch.stack([norm(part) for norm, part in parts])

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = (torch.randn(5, 12) * 1e-3).to(dtype)
        report = check_program(Norms().to(dtype), (x,), [NAME])
        assert report.fired(NAME) == 1


def test_golden() -> None:
    def program(x: Tensor, w: list[Tensor]) -> Tensor:
        parts = zip(x.split(4, 1), w, strict=True)
        return torch.stack([F.rms_norm(p, (4,), v, 1e-3) for p, v in parts])

    w = [nn.Parameter(torch.rand(4)) for _ in range(3)]
    assert_expected_inline(
        rewrite(NAME, program, (torch.randn(5, 12), w)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
rms_norm_3 = rms_norm(unflatten, [4], None, 0.001)
stack_1 = stack([w_0, w_1, w_2])
mul = mul(rms_norm_3, stack_1)
unbind = unbind(mul, 1)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
getitem_2 = getitem(unbind, 2)
stack = stack([getitem, getitem_1, getitem_2])
return stack""",
    )
