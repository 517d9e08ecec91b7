"""The joint optimizer against its parts, row-wise Adagrad against TorchRec's, schedules by hand."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRecRowWiseAdagrad

from recsys.optim import (
    DENSE_OPTIMIZERS,
    SPARSE_OPTIMIZERS,
    JointOptimizer,
    OptimizerConfig,
    RowWiseAdagrad,
    scheduler,
)


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(20, 4, mode="sum")
        self.linear = nn.Linear(4, 1)

    def loss(self, step: int) -> Tensor:
        ids = torch.randint(20, (8, 2), generator=torch.Generator().manual_seed(step))
        return (self.linear(self.table(ids)) - 1).square().mean()


def joint(model: TwoParts, sparse: str, dense: str) -> JointOptimizer:
    return JointOptimizer(
        OptimizerConfig(sparse, lr=0.1).build(model.table.parameters(), "sparse"),
        OptimizerConfig(dense, lr=0.01).build(model.linear.parameters(), "dense"),
    )


def train(
    model: TwoParts, *optimizers: torch.optim.Optimizer, first: int = 0, last: int = 5
) -> None:
    for step in range(first, last):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.loss(step).backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    for (key, a), b in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("sparse", SPARSE_OPTIMIZERS)
@pytest.mark.parametrize("dense", DENSE_OPTIMIZERS)
def test_joint_steps_equal_the_steps_of_its_parts(sparse: str, dense: str) -> None:
    one, two = TwoParts(), TwoParts()
    train(one, joint(one, sparse, dense))
    train(two, *joint(two, sparse, dense).optimizers)
    assert_equal(one, two)
    assert not torch.equal(one.table.weight, TwoParts().table.weight)


@pytest.mark.parametrize("sparse", SPARSE_OPTIMIZERS)
@pytest.mark.parametrize("dense", ["sgd", "adamw"])
def test_a_loaded_state_goes_on_as_if_never_stopped(sparse: str, dense: str) -> None:
    straight = TwoParts()
    train(straight, joint(straight, sparse, dense), last=6)

    stopped = TwoParts()
    optimizer = joint(stopped, sparse, dense)
    train(stopped, optimizer, last=3)
    buffer = io.BytesIO()
    torch.save([stopped.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    resumed = TwoParts()
    resumed.load_state_dict(weights)
    optimizer = joint(resumed, sparse, dense)
    optimizer.load_state_dict(state)
    train(resumed, optimizer, first=3, last=6)
    assert_equal(resumed, straight)


def test_the_state_dict_has_torchs_layout() -> None:
    model = TwoParts()
    optimizer = joint(model, "adam", "adam")
    train(model, optimizer)
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0], [1, 2]]
    assert [group["name"] for group in state["param_groups"]] == ["sparse", "dense"]
    assert sorted(state["state"]) == [0, 1, 2]
    single = torch.optim.Adam(
        [{"params": [model.table.weight]}, {"params": model.linear.parameters()}]
    )
    single.load_state_dict(state)  # a plain optimizer takes it


def test_how_steps_are_computed_is_not_taken_from_a_checkpoint() -> None:
    model = TwoParts()
    optimizer = joint(model, "adam", "adam")
    train(model, optimizer)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["fused"], group["foreach"], group["lr"] = None, True, 0.5
    optimizer.load_state_dict(state)
    assert [(g["fused"], g["foreach"], g["lr"]) for g in optimizer.param_groups] == [
        (True, None, 0.5)
    ] * 2


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_keep_groups_and_state(twin_of: object) -> None:
    model = TwoParts()
    optimizer = joint(model, "rowwise_adagrad", "adam")
    train(model, optimizer)
    twin, twin_model = twin_of((optimizer, model))  # pyright: ignore
    train(model, optimizer, first=5, last=7)
    train(twin_model, twin, first=5, last=7)
    assert_equal(twin_model, model)


def test_a_closure_runs_once() -> None:
    model = TwoParts()
    optimizer, calls = joint(model, "adagrad", "sgd"), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = model.loss(0)
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), TwoParts().loss(0))
    assert calls == [True]


def test_groups_cannot_be_added_later() -> None:
    model = TwoParts()
    with pytest.raises(NotImplementedError, match="before joining"):
        joint(model, "sgd", "sgd").add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_rowwise_adagrad_is_torchrecs() -> None:
    ours, theirs = TwoParts(), TwoParts()
    train(ours, RowWiseAdagrad([ours.table.weight], lr=0.1, eps=1e-6))
    train(theirs, TorchRecRowWiseAdagrad([theirs.table.weight], lr=0.1, eps=1e-6))
    torch.testing.assert_close(ours.table.weight, theirs.table.weight)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_sparse_gradients_give_the_same_steps(name: str) -> None:
    config = OptimizerConfig(name, lr=0.1)
    assert config.takes_sparse_gradients
    dense, sparse = TwoParts(), TwoParts()
    sparse.table.sparse = True
    train(dense, config.build([dense.table.weight], "sparse"))
    train(sparse, config.build([sparse.table.weight], "sparse", sparse_gradients=True))
    torch.testing.assert_close(sparse.table.weight, dense.table.weight)


def test_rowwise_adagrad_refuses_what_is_no_table() -> None:
    with pytest.raises(ValueError, match="2-D tables"):
        RowWiseAdagrad([nn.Parameter(torch.ones(3))])


def rates(config: OptimizerConfig, steps: int, total: float = 0) -> list[float]:
    optimizer = JointOptimizer(config.build([nn.Parameter(torch.ones(1))], "dense"))
    schedule = scheduler(optimizer, config.schedule(total))
    seen: list[float] = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_warm_up_then_polynomial_decay() -> None:
    config = OptimizerConfig("sgd", 8.0, warmup_steps=4, decay_start=6, decay_steps=4)
    expected = [2.0, 4, 6, 8, 8, 8, 8, 8 * 0.75**2, 2, 0.5, 0, 0]
    assert rates(config, 12) == pytest.approx(expected)


def test_decay_over_all_of_training_and_no_decay_at_all() -> None:
    linear = OptimizerConfig("sgd", 1.0, warmup_steps=2, decay_steps=-1, decay_power=1.0)
    assert rates(linear, 6, total=6) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    assert rates(OptimizerConfig("sgd", 1.0), 3) == [1.0, 1.0, 1.0]


def test_decay_until_an_end_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="set max_epochs or max_steps"):
        OptimizerConfig("sgd", decay_steps=-1).schedule(math.inf)


def test_schedules_of_the_groups_are_apart_and_survive_a_checkpoint() -> None:
    def make(warmup: int) -> tuple[JointOptimizer, LambdaLR]:
        optimizer = joint(TwoParts(), "sgd", "sgd")
        slow = OptimizerConfig("sgd", 0.1, warmup_steps=warmup).schedule(0)
        return optimizer, scheduler(optimizer, slow, OptimizerConfig("sgd", 0.01).schedule(0))

    optimizer, schedule = make(warmup=10)
    optimizer.step()
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.02, 0.01])
    twin, twin_schedule = make(warmup=99)
    twin.load_state_dict(optimizer.state_dict())
    twin_schedule.load_state_dict(schedule.state_dict())
    twin.step()
    twin_schedule.step()
    assert [g["lr"] for g in twin.param_groups] == pytest.approx([0.03, 0.01])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "adagrd"}, "'adagrd' is unknown, did you mean adagrad"),
        ({"name": "sgd", "lr": 0}, "lr is 0, must be above 0"),
        ({"name": "sgd", "betas": (0.9, 0.99)}, "sgd has no option betas, it has momentum"),
        ({"name": "adam", "decay_steps": -2}, "decay_steps -2"),
        ({"nam": "adam"}, "'nam' is unknown, did you mean name"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OptimizerConfig.of(options)
