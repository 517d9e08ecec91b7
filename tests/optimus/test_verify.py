"""A rewritten graph that means something else must be caught: one test a kind of fault."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.fx import GraphModule, Node, symbolic_trace

from optimus.backend import OptimusBackend, copy_graph_module
from optimus.driver import Phase
from optimus.editor import Editor
from optimus.gaps import Gap, compare, on_average, pool, worst
from optimus.pattern import Match, Miss, Pattern
from optimus.pipeline import Selection
from optimus.verify import CannotVerify, Verifier, guilty, nearby, trace
from tests.optimus.capture import Captured

_Pair = tuple[torch.Tensor, torch.Tensor]


def _graph(function: Callable[..., object]) -> GraphModule:
    return symbolic_trace(function)


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]


def _original(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).relu()
    return y, y.sum(0)


def _regrouped(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.cat([x[:, :2] @ w[:2] + x[:, 2:] @ w[2:]], 0).relu()
    return y, y.sum(0)


def _other_value(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).relu()
    return y, y.mean(0)


def _lost_gradient(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w.detach()).relu()
    return y, y.sum(0)


def _half_precision(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x.bfloat16() @ w.bfloat16()).float().relu()
    return y, y.sum(0)


def _other_dtype(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).relu()
    return y.double(), y.sum(0)


def _other_stride(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).relu()
    return y.t().contiguous().t(), y.sum(0)


def _shared_memory(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.cat([(x @ w).relu(), (x @ w).relu().sum(0, keepdim=True)])
    return y[:5], y[5]


def _random_draw(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).relu()
    torch.rand_like(x)
    return y, y.sum(0)


def test_another_order_of_summing_is_no_difference() -> None:
    assert Verifier(_graph(_original), _inputs()).difference(_graph(_regrouped)) is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (_other_value, "output 1"),
        (_lost_gradient, "gradient of input 1"),
        (_half_precision, "is off by"),
        (_other_dtype, "output 0"),
        (_other_stride, "stride"),
        (_shared_memory, "memory"),
        (_random_draw, "random state"),
    ],
)
def test_a_difference_is_found(wrong: Callable[..., object], named: str) -> None:
    difference = Verifier(_graph(_original), _inputs()).difference(_graph(wrong))
    assert difference is not None
    assert named in difference


def test_a_write_to_an_input_is_found() -> None:
    def reads(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        return x * 2

    def writes(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return x * 2

    inputs = [torch.randn(3, requires_grad=True), torch.zeros(())]
    assert "input 1" in str(Verifier(_graph(reads), inputs).difference(_graph(writes)))


def test_one_lucky_number_is_no_difference() -> None:
    """A gradient of one element may by chance be almost exact in the original: more runs decide."""
    torch.manual_seed(0)
    inputs = [torch.randn(4096, 8).bfloat16(), torch.randn(1, dtype=torch.bfloat16)]
    inputs[1].requires_grad_()

    def plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (x + bias).sum(1)

    def other(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.cat([(x[:, :4] + bias), (x[:, 4:] + bias)], 1).sum(1)

    for seed in range(12):
        torch.manual_seed(seed)
        fresh = [torch.randn_like(inputs[0]), inputs[1]]
        assert Verifier(_graph(plain), fresh).difference(_graph(other)) is None


def test_luck_before_the_last_rounding_is_no_difference() -> None:
    """A small table has a few rows, each rounded once: over and over in every sample and, behind a
    norm, larger than all that is rounded later. Which of two graphs is nearer is luck."""

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm((x @ w).float(), (4,))

    def other(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(((x * 1.37) @ w).float() / 1.37, (4,))

    lucky = 0
    for seed in range(12):
        torch.manual_seed(seed)
        rows = torch.randn(2, 4)[torch.randint(2, (256,))]
        inputs = [rows, torch.randn(4, 4, requires_grad=True)]
        with torch.autocast("cpu", torch.bfloat16):
            runs = [trace(_graph(graph), inputs) for graph in (plain, other)]
            assert Verifier(_graph(plain), inputs).difference(_graph(other)) is None
        exact = trace(_graph(plain), inputs, widen=True)
        lucky += worst(compare(*runs, exact)) is None
    assert lucky < 12


def test_statistics_in_float32_of_half_precision_may_differ_by_part_of_its_rounding() -> None:
    """A mean over a batch of bf16 numbers is nearer to float64 than they are, in both graphs, if
    not by the same factor; a number that is rounded once more than it ought to be is a fault."""

    class Statistics(torch.nn.Module):
        def __init__(self, shift: float, rounds: bool) -> None:
            super().__init__()
            self.shift, self.rounds = shift, rounds

        def forward(self, x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor) -> _Pair:
            y = (x @ w).float()
            mean.copy_(mean * 0.9 + y.mean(0) * 0.1 + self.shift)
            other = x.sigmoid()
            return y, other.bfloat16().float() if self.rounds else other

    torch.manual_seed(0)
    inputs = [torch.randn(512, 4), torch.randn(4, 4, requires_grad=True), torch.ones(4)]

    def run(shift: float, rounds: bool) -> str | None:
        with torch.autocast("cpu", torch.bfloat16):
            original = Captured(Statistics(0.0, False), inputs)
            other = Captured(Statistics(shift, rounds), inputs)
            return Verifier(original.module, original.inputs).difference(other.module)

    assert run(3e-4, False) is None
    assert run(0.0, True) is not None
    assert run(3e-3, False) is not None


def _keeps_a_mean(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    mean.copy_(mean * 0.9 + (x @ w).float().mean(0) * 0.1)
    return x.bfloat16() @ w.bfloat16()


def _forgets_the_mean(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    mean.copy_(mean)
    return x.bfloat16() @ w.bfloat16()


def _forgets_a_weight(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    result = _keeps_a_mean(x, w, mean)
    w.detach().mul_(1 + 1e-4)
    return result


@pytest.mark.parametrize("wrong", [_forgets_the_mean, _forgets_a_weight])
def test_what_is_written_is_judged_by_itself_however_large_other_inputs_are(
    wrong: Callable[..., object],
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(64, 4) * 1000, torch.randn(4, 4) * 1e-4, torch.zeros(4)]
    original = Captured(_keeps_a_mean, inputs)
    difference = Verifier(original.module, original.inputs).difference
    assert difference(Captured(_keeps_a_mean, inputs).module) is None
    assert "input" in str(difference(Captured(wrong, inputs).module))


def test_a_graph_that_fails_on_data_nearby_is_told() -> None:
    def wrong(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._assert(x[0, 0] == 2, "not these data")
        y = (x @ w).relu()
        return y, y.sum(0) * (1 + 1e-5)

    inputs = _inputs()
    inputs[0].data[0, 0] = 2
    found = Verifier(_graph(_original), inputs).difference(_graph(wrong))
    assert found is not None
    assert "data nearby" in found


def test_what_is_plainly_wrong_on_the_data_at_hand_stays_so() -> None:
    usual = {"x": Gap(own=1.0, error=1.0)}
    for error, is_wrong in ((2.5, False), (40.0, True)):
        first = {"x": Gap(own=0.1, error=error)}
        pooled = first
        for _ in range(32):
            pooled = pool(pooled, usual)
        assert (worst(on_average(first, pooled, 33)) is not None) == is_wrong


def test_data_nearby_share_memory_and_keep_signs_and_zeros() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    inputs = [x, x.detach()[:, 2:], torch.arange(3), torch.tensor([0.0, 1.0, -1.0]), 2]
    moved = nearby(inputs, seed=1)
    assert torch.equal(moved[1], moved[0].detach()[:, 2:])
    assert moved[1].untyped_storage()._cdata == moved[0].untyped_storage()._cdata
    assert moved[0].requires_grad
    assert torch.equal(moved[2], inputs[2]) and moved[4] == 2
    assert (moved[0].sign() == x.sign()).all() and 0 < (moved[0] - x).abs().max() < 0.3
    assert moved[3][0] == 0 and 0.9 < moved[3][1] <= 1 and -1 <= moved[3][2] < -0.9


def test_a_gap_is_judged_by_all_runs_together() -> None:
    lucky, usual = Gap(own=0.2, error=0.5), Gap(own=0.5, error=0.4)
    assert not lucky.is_allowed
    assert not lucky.is_plain
    assert pool({"x": lucky}, {"x": usual})["x"].is_allowed
    assert not pool({"x": lucky}, {"x": lucky})["x"].is_allowed
    assert Gap(own=1e-7, error=0.7).is_plain


def test_inputs_without_data_cannot_be_verified() -> None:
    with pytest.raises(CannotVerify, match="no data"):
        Verifier(_graph(_original), [x.to("meta") for x in _inputs()])


def test_bisection_names_the_pattern_that_makes_the_difference() -> None:
    names = ["a", "b", "c", "d", "e"]
    for culprit in names:
        assert guilty(names, lambda prefix, culprit=culprit: culprit in prefix) == culprit
    assert guilty(names, lambda prefix: True) is None


@dataclass(frozen=True)
class ReluToSigmoid(Pattern):
    """Wrong on purpose."""

    anchors = ("relu",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        return Match((node,))

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call("sigmoid", match.anchor.args[0]))

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def test_the_backend_leaves_out_a_wrong_pattern_and_goes_on_with_the_rest() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    backend = OptimusBackend("none", inner="eager")
    backend.selection = Selection((Phase("vertical", (ReluToSigmoid(),)),))
    x = torch.randn(3, 4)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(x), model(x))
    graph = backend.report.graphs[0]
    assert list(graph.dropped) == ["relu_to_sigmoid"]
    assert graph.verified == "verified"
    assert "relu_to_sigmoid is left out" in backend.report.table()


def test_a_graph_that_fails_midway_leaves_no_autocast_on() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    captured = Captured(program, (torch.randn(3, 3),))
    broken = copy_graph_module(captured.module)
    product = next(n for n in broken.graph.nodes if n.target is operator.matmul)
    product.target = operator.getitem
    broken.recompile()
    verifier = Verifier(captured.module, captured.inputs)
    with torch.no_grad():
        assert "fails" in str(verifier.difference(broken))
        assert not torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_complex_numbers_are_compared_as_pairs_of_real_ones() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ w[:, :2]).sum(0), (x @ w[:, 2:]).sum(0)

    def other(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, two = (x @ w).split(2, 1)
        return one.sum(0), two.conj().sum(0)

    def regrouped(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, two = (x @ w).split(2, 1)
        return one.sum(0), two.sum(0)

    shapes = ((5, 4), (4, 4))
    inputs = [torch.randn(s, dtype=torch.complex64, requires_grad=True) for s in shapes]
    verifier = Verifier(_graph(program), inputs)
    assert verifier.difference(_graph(regrouped)) is None
    assert "is off by" in str(verifier.difference(_graph(other)))


def test_memory_may_be_shared_as_in_eager_mode_or_as_when_compiled() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, torch.nn.functional.dropout(y, 0.5, False)

    backend = OptimusBackend("all", inner="eager")
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.randn(3, 4))
    graph = backend.report.graphs[0]
    assert graph.verified == "verified"
    assert not graph.dropped
