"""Linears keep their inputs in eight bits: where it saves memory, and saying what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from optimus.backend import OptimusBackend
from optimus.patterns.kernels.quantize_saved_activations import QuantizeSavedActivations
from optimus.pipeline import pattern_names, select
from optimus.testing import check_program
from tests.optimus.capture import Captured
from tests.optimus.counting import count
from tests.optimus.patterns.kernels import fuse, missed
from tests.optimus.patterns.rewriting import Program

NAME = "quantize_saved_activations"
PATTERN = QuantizeSavedActivations()
X = torch.randn(16, 8)
W, V = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
B = torch.randn(4, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.layer_norm(F.linear(x, w), (8,)), v, b).sin()

    result = fuse(PATTERN, program, (X, W, V, B))
    assert_expected_inline(
        result.text,
        """\
linear = linear(x, w)
layer_norm = layer_norm(linear, [8])
linear_saving_quantized_default = linear_saving_quantized.default(layer_norm, v, b, 'int8')
sin = sin(linear_saving_quantized_default)
return sin""",
    )


def test_no_preset_selects_it() -> None:
    assert NAME in pattern_names()
    for preset in ("all", "kernels", "vertical", "horizontal", ["all", "kernels"]):
        assert NAME not in select(preset).names
    assert NAME in select(["all", NAME]).names
    assert NAME in select("activation_quantization_aten_pass").names


OTHER: list[Program] = [
    lambda x, w, v: F.linear(x, w),
    lambda x, w, v: F.linear(x[:, :8], w),
    lambda x, w, v: F.linear(F.linear(x, w).tanh(), v),
    lambda x, w, v: F.linear(F.linear(x, w).cos(), v.detach()),
    lambda x, w, v: F.linear(F.linear(x, w).cos()[0], v),
    lambda x, w, v: F.linear((y := F.linear(x, w).cos()), v).sum() + (y * y).sum(),
    lambda x, w, v: F.linear((y := F.linear(x, w).cos())[:4], v).sum() + y.pow(2).sum(),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(PATTERN, program, X, W, V)


def test_relu_in_a_half_type_keeps_as_much_as_is_saved() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.linear(x, w).relu(), v)

    half = [t.detach().bfloat16().requires_grad_(t.requires_grad) for t in (X, W, V)]
    assert "kept for another gradient" in missed(PATTERN, program, *half)


def test_without_gradients() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return F.linear(F.linear(x, w).cos(), v)

    missed(PATTERN, program, X, W, V)


def test_small_inputs_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for least, fired in ((16 * 8 * 4, 1), (16 * 8 * 4 + 1, 0)):
        selection = select(NAME, knobs={NAME: {"min_bytes": least}})
        assert check_program(model, (X,), selection).fired(NAME) == fired


def _compiled(module: nn.Module, *inputs: Tensor, **knobs: Any) -> OptimusBackend:
    torch._dynamo.reset()
    backend = OptimusBackend(NAME, inner="aot_eager", knobs={NAME: {"min_bytes": 0} | knobs})
    torch.compile(module, backend=backend)(*inputs)
    return backend


MODEL = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn"])
def test_the_report_tells_the_measured_error(storage: str) -> None:
    torch.manual_seed(0)
    report = _compiled(MODEL, torch.randn(256, 8), storage=storage).report
    assert report.fired(NAME) == 1
    text = report.graphs[0].approximated[NAME]
    assert "% of its norm on the inputs at hand (allowed: 5.00%)" in text
    assert "is off by 0.00%" not in text
    assert f"{NAME} is approximate: gradient of input" in report.table()
    assert "verified" in report.graphs[0].verified


def test_what_is_too_inaccurate_is_left_out() -> None:
    torch.manual_seed(0)
    report = _compiled(MODEL, torch.randn(256, 8), bound=1e-4).report
    assert report.fired(NAME) == 0
    assert "is off by" in report.graphs[0].dropped[NAME]
    assert not report.graphs[0].approximated


def test_what_is_not_finite_passes_verification() -> None:
    x = torch.randn(64, 8)
    x[3], x[7, 2] = torch.nan, torch.inf
    report = _compiled(nn.Sequential(nn.LayerNorm(8), *MODEL), x, storage="int8").report
    assert report.fired(NAME) == 2 and not report.graphs[0].dropped


def test_a_compiler_saves_less() -> None:
    model = nn.Sequential(nn.Linear(8, 128), nn.LayerNorm(128), nn.Linear(128, 4))

    def program(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    captured = Captured(program, (torch.randn(64, 8),))
    plain = count(captured.module, captured.inputs).saved_bytes
    now = fuse(PATTERN, program, (torch.randn(64, 8),)).module
    assert count(now, captured.inputs).saved_bytes <= plain - 64 * 128 * 4 + 64 * (128 + 4)


def test_empty_batch() -> None:
    report = check_program(
        MODEL, (torch.randn(0, 8),), select(NAME, knobs={NAME: {"min_bytes": 0}})
    )
    assert report.fired(NAME) == 1


def test_under_autocast_gradients_have_their_types() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = self.second(F.silu(self.first(x)))
            return out

    selection = select(NAME, knobs={NAME: {"min_bytes": 0}})
    assert check_program(Cast(), (X,), selection).fired(NAME) == 1


def test_unknown_storage() -> None:
    with pytest.raises(ValueError, match="valid: int8, float8_e4m3fn"):
        replace(PATTERN, storage="int4")
