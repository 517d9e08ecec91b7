"""What the window of a training step keeps, and until when."""

from __future__ import annotations

import torch

from recsys.metrics import RecMetrics
from recsys.window import TrainWindow


def test_a_window_keeps_no_more_than_logits_and_labels() -> None:
    window, metrics = TrainWindow(2), RecMetrics(2)
    for step in range(3):
        batch = torch.rand(4, 1000).round()  # all of a batch, moved at once
        logits, labels = torch.randn(4, 2), batch[:, :2]
        window.add(step, logits.mean(), logits, labels)
        metrics.update(logits, labels)
        logits.zero_()  # as the replay of a CUDA graph would overwrite them
        batch.zero_()
    assert all(kept.untyped_storage().nbytes() == 4 * 2 * 2 * 4 for kept in window._pending)
    expected = metrics.compute()
    for name, value in window.compute().items():
        torch.testing.assert_close(value, expected[name])
