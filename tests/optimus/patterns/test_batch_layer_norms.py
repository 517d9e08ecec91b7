"""LayerNorms of parts of one tensor become one."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "batch_layer_norms"
X = torch.randn(5, 12, requires_grad=True)
W = [nn.Parameter(torch.rand(4) + 0.5) for _ in range(3)]
B = [nn.Parameter(torch.randn(4)) for _ in range(3)]
F = torch.nn.functional


def test_golden() -> None:
    def program(x: Tensor, w: list[Tensor], b: list[Tensor]) -> Tensor:
        parts = x.split(4, 1)
        norms = [F.layer_norm(parts[i], (4,), w[i], b[i], 1e-3) for i in (1, 0, 2)]
        return torch.stack(norms)

    assert_expected_inline(
        rewrite(NAME, program, (X, W, B)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
layer_norm_3 = layer_norm(unflatten, [4], None, None, 0.001)
stack_1 = stack([w_0, w_1, w_2])
mul = mul(layer_norm_3, stack_1)
stack_2 = stack([b_0, b_1, b_2])
add = add(mul, stack_2)
unbind = unbind(add, 1)
getitem_3 = getitem(unbind, 0)
getitem_4 = getitem(unbind, 1)
getitem_5 = getitem(unbind, 2)
stack = stack([getitem_4, getitem_3, getitem_5])
return stack""",
    )


def test_in_half_precision() -> None:
    """Scale and shift are applied before the only rounding."""

    def program(x: Tensor, w: list[Tensor], b: list[Tensor]) -> Tensor:
        parts = zip(x.split(4, 1), w, b, strict=True)
        return torch.stack([F.layer_norm(p, (4,), v, c) for p, v, c in parts])

    half = [[nn.Parameter(t.detach().bfloat16()) for t in each] for each in (W, B)]
    inputs = (X.detach().bfloat16(), *half)
    assert_expected_inline(
        rewrite(NAME, program, inputs).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
to = to(unflatten, dtype=float32)
layer_norm_3 = layer_norm(to, [4])
stack_1 = stack([w_0, w_1, w_2])
mul = mul(layer_norm_3, stack_1)
stack_2 = stack([b_0, b_1, b_2])
add = add(mul, stack_2)
to_1 = to(add, dtype=bfloat16)
unbind = unbind(to_1, 1)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
getitem_2 = getitem(unbind, 2)
stack = stack([getitem, getitem_1, getitem_2])
return stack""",
    )

    def autocast(x: Tensor, w: list[Tensor], b: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return program(x, w, b)

    for x in (X.detach(), X.detach().bfloat16()):
        assert fired(NAME, autocast, x, W, B) == 1


def test_of_one_input() -> None:
    """One that shares a scale and one that is only returned stay alone."""

    def program(x: Tensor, w: list[Tensor], b: list[Tensor]) -> tuple[Tensor, ...]:
        norms = [F.layer_norm(x, (4,), *affine) for affine in zip(w, b, strict=True)]
        other = F.layer_norm(x, (4,), w[0], b[1])
        return torch.stack([*norms, other]), F.layer_norm(x, (4,), b[0], w[0])

    assert_expected_inline(
        rewrite(NAME, program, (X[:, :4].detach(), W, B)).text,
        """\
unsqueeze = unsqueeze(x, 0)
layer_norm_5 = layer_norm(unsqueeze, [4])
stack_1 = stack([w_1, w_2])
unsqueeze_1 = unsqueeze(stack_1, 1)
mul = mul(layer_norm_5, unsqueeze_1)
stack_2 = stack([b_1, b_2])
unsqueeze_2 = unsqueeze(stack_2, 1)
add = add(mul, unsqueeze_2)
unbind = unbind(add)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
layer_norm = layer_norm(x, [4], w_0, b_0)
other = layer_norm(x, [4], w_0, b_1)
layer_norm_4 = layer_norm(x, [4], b_0, w_0)
stack = stack([layer_norm, getitem, getitem_1, other])
return stack, layer_norm_4""",
    )


def test_with_one_module() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([F.layer_norm(part, (4,), W[0], B[0]) for part in x.unbind(1)])

    result = rewrite(NAME, program, (torch.randn(5, 3, 4),))
    assert result.fired == 1 and "mul" not in result.text


def test_other() -> None:
    """Other eps or shapes, one without scale, a write in between, an input that is no part."""

    def eps(x: Tensor) -> Tensor:
        return F.layer_norm(x[:, :4], (4,), W[0]) + F.layer_norm(x[:, 4:8], (4,), W[1], eps=1e-3)

    def shape(x: Tensor) -> Tensor:
        x = x.unflatten(1, (3, 2, 2))
        one = F.layer_norm(x[:, 0], (2,), W[0][:2])
        return one + F.layer_norm(x[:, 1], (2, 2), W[1].view(2, 2))

    def scale(x: Tensor) -> Tensor:
        return F.layer_norm(x[:, :4], (4,), W[0]) + F.layer_norm(x[:, 4:8], (4,), None, W[1])

    def written(x: Tensor) -> Tensor:
        x = x.clone()
        one = F.layer_norm(x[:, :4], (4,), W[0].detach())
        x[:, 4] = 0.5
        return one + F.layer_norm(x[:, 4:8], (4,), W[1].detach())

    def apart(x: Tensor) -> Tensor:
        return F.layer_norm(x[:, :4], (4,), W[0]) + F.layer_norm(x[:, 4:8] + 1, (4,), W[1])

    for program in (eps, shape, scale, written, apart):
        missed(NAME, program, X.detach())
