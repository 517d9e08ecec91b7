"""Metrics against exact definitions, in one process and summed over two."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.classification import BinaryAUROC

from recsys.metrics import RecMetrics, flatten
from tests import processes


def samples(num: int, num_tasks: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of a calibrated model and labels drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, num_tasks, generator=generator) * 1.5 - 2
    labels = torch.rand(num, num_tasks, generator=generator) < logits.sigmoid()
    return logits, labels.float()


def computed(logits: Tensor, labels: Tensor, batches: int = 1) -> dict[str, Tensor]:
    metrics = RecMetrics(logits.shape[1])
    for some_logits, some_labels in zip(logits.chunk(batches), labels.chunk(batches), strict=True):
        metrics.update(some_logits, some_labels)
    return metrics.compute()


def exact_auc(logits: Tensor, labels: Tensor) -> float:
    return float(BinaryAUROC()(logits.double(), labels.int()))


@pytest.mark.parametrize("num", [50, 5_000, 200_000])
def test_auc_is_the_exact_one_to_a_hundred_thousandth(num: int) -> None:
    logits, labels = samples(num)
    auc = computed(logits, labels, batches=7)["auc"]
    for task in range(2):
        assert float(auc[task]) == pytest.approx(
            exact_auc(logits[:, task], labels[:, task]), abs=1e-5
        )


def test_auc_counts_ties_one_half() -> None:
    logits = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    labels = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    # Pairs (positive, negative): two ties, one won, one lost.
    assert float(computed(logits, labels)["auc"]) == 0.5
    assert float(computed(logits, 1 - labels.flip(0))["auc"]) == 0.5
    assert float(computed(torch.arange(4.0).unsqueeze(1), labels)["auc"]) == 0.75


@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0])
def test_auc_stays_within_its_stated_bound(scale: float) -> None:
    logits, labels = samples(20_000, 1)
    logits = logits * scale
    metrics = RecMetrics(1)
    metrics.update(logits, labels)
    negatives, positives = metrics.histogram[:, 0].double()
    bound = (positives * negatives).sum() / (2 * positives.sum() * negatives.sum())
    error = abs(float(metrics.compute()["auc"]) - exact_auc(logits[:, 0], labels[:, 0]))
    assert error <= float(bound)


def test_logloss_ne_and_calibration_follow_their_definitions() -> None:
    logits, labels = samples(3_000)
    values = computed(logits, labels, batches=4)
    p, y = logits.double().sigmoid(), labels.double()
    logloss = -(y * p.log() + (1 - y) * (1 - p).log()).mean(0)
    rate = y.mean(0)
    entropy = -(rate * rate.log() + (1 - rate) * (1 - rate).log())
    torch.testing.assert_close(values["logloss"], logloss, rtol=1e-6, atol=0)
    torch.testing.assert_close(values["ne"], logloss / entropy, rtol=1e-6, atol=0)
    torch.testing.assert_close(values["calibration"], p.sum(0) / y.sum(0), rtol=1e-6, atol=0)
    assert values["num_samples"].tolist() == [3_000, 3_000]


def test_the_base_rate_as_prediction_has_ne_one_and_calibration_one() -> None:
    labels = torch.tensor([1.0, 0, 0, 0]).unsqueeze(1)
    logits = torch.full_like(labels, math.log(0.25 / 0.75))
    values = computed(logits, labels)
    assert float(values["ne"]) == pytest.approx(1, abs=1e-6)
    assert float(values["calibration"]) == pytest.approx(1, abs=1e-6)


def test_one_class_only_gives_nan_not_a_made_up_number() -> None:
    logits, labels = samples(10, 1)
    values = computed(logits, torch.zeros_like(labels))
    assert all(math.isnan(float(values[name])) for name in ("auc", "ne", "calibration"))
    assert math.isfinite(float(values["logloss"]))


def test_a_nan_logit_shows_in_the_logloss_of_its_task_only() -> None:
    logits, labels = samples(10)
    logits[3, 1] = math.nan
    logloss = computed(logits, labels)["logloss"].tolist()
    assert math.isfinite(logloss[0])
    assert math.isnan(logloss[1])


def test_bfloat16_logits_are_taken_as_they_are() -> None:
    logits, labels = samples(4_000, 1)
    rounded = logits.bfloat16()
    auc = float(computed(rounded, labels)["auc"])
    assert auc == pytest.approx(exact_auc(rounded.float()[:, 0], labels[:, 0]), abs=1e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"both must be \(batch, 2\)"):
        RecMetrics(2).update(torch.zeros(4, 1), torch.zeros(4, 1))


def test_reset_forgets_everything_and_nothing_is_in_the_state_dict() -> None:
    logits, labels = samples(100)
    metrics = RecMetrics(2)
    metrics.update(-logits, labels)
    metrics.reset()
    metrics.update(logits, labels)
    assert torch.equal(metrics.compute()["auc"], computed(logits, labels)["auc"])
    assert metrics.state_dict() == {}


def test_flatten_names_means_and_tasks() -> None:
    values = {"auc": torch.tensor([0.6, 0.8]), "num_samples": torch.tensor([5.0, 5.0])}
    flat = flatten(values, "val", ("click", "buy"), per_task=True)
    assert list(flat) == ["val/auc", "val/num_samples", "val/auc/click", "val/auc/buy"]
    assert float(flat["val/auc"]) == pytest.approx(0.7)
    assert float(flat["val/num_samples"]) == 5
    assert list(flatten(values, "train", ("click", "buy"), per_task=False)) == [
        "train/auc",
        "train/num_samples",
    ]


def half(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    logits, labels = samples(1_000)
    metrics = RecMetrics(2)
    # Unequal shares: a mean of the ranks' metrics would be wrong.
    share = slice(0, 300) if rank == 0 else slice(300, 1_000)
    metrics.update(logits[share], labels[share])
    torch.save(metrics.compute(), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_compute_what_one_would(tmp_path: Path) -> None:
    ranks = [
        [sys.executable, "-c", f"from {__name__} import half; half({rank}, {str(tmp_path)!r})"]
        for rank in (0, 1)
    ]
    with processes.running(ranks[1], forked=True):
        done = processes.run(ranks[0], forked=True)
    assert done.returncode == 0, done.stderr
    expected = computed(*samples(1_000))
    for rank in (0, 1):
        values = torch.load(tmp_path / f"{rank}.pt")
        # Probabilities are float32: a last bit depends on the place in a vector register.
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=0)
