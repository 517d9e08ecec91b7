"""Whatever fails in Optimus, training goes on, and what failed is said."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from optimus import summary, takeover
from optimus.callback import OptimusCallback
from optimus.logbook import Logbook
from tests.optimus.foreign_modules import Branches, Gan, Regressor, loader, trainer


def optimus(**given: Any) -> OptimusCallback:
    defaults: dict[str, Any] = {
        "baseline_steps": 6,
        "warmup_steps": 1,
        "window": 2,
        "inner": "eager",
    }
    return OptimusCallback(**(defaults | given))


def fit(path: Path, callback: OptimusCallback, module: Any, batches: int = 14) -> dict[str, Any]:
    """Train; every batch must have been trained on, and the module must be left as it was."""
    run = trainer(path, callback)
    run.fit(module, loader(batches))
    assert run.state.finished
    assert run.fit_loop.epoch_loop.total_batch_idx == batches - 1
    assert not [m for m in module.modules() if "_compiled_call_impl" in m.__dict__]
    return callback.summary()


@torch.library.custom_op("optimus_test::thirds", mutates_args=())
def thirds(x: torch.Tensor) -> torch.Tensor:
    """Runs eagerly; what it tells the compiler about its shape is wrong."""
    return x / 3


@thirds.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no rule for this shape")


thirds.register_autograd(lambda ctx, grad: grad / 3)


class UsesThirds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Branches()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return thirds(self.net(x))


class CannotCompile(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net = UsesThirds()  # type: ignore[assignment]


def test_an_op_that_cannot_be_compiled(tmp_path: Path) -> None:
    torch.manual_seed(2)
    module = CannotCompile()
    torch.manual_seed(2)
    twin = CannotCompile()
    with pytest.warns(UserWarning, match="no rule for this shape"):
        found = fit(tmp_path / "a", optimus(), module)
    fit(tmp_path / "b", optimus(baseline="off", patterns="none", target=[]), twin)
    for mine, plain in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, plain), "uncompiled, and each step counted once"
    failed = [r for r in found["remarks"] if "failed under torch.compile" in r]
    assert len(failed) == 2, "under the baseline and under Optimus"
    assert "baseline" in failed[0]


def test_one_target_of_two_that_fails_leaves_the_other_compiled(tmp_path: Path) -> None:
    class HalfBroken(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.generator.append(BrokenLast())

    with pytest.warns(UserWarning, match="generator failed under torch.compile"):
        found = fit(tmp_path, optimus(), HalfBroken())
    assert found["phases"]["optimised"]["graphs"] > 0
    assert all("generator" in r for r in found["remarks"] if "failed" in r)


class BrokenLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return thirds(x)


@pytest.mark.slow
def test_a_compiler_that_does_not_work(tmp_path: Path) -> None:
    """The C++ compiler is missing, as on many machines: inductor fails on every graph."""
    callback = optimus(inner="inductor", inner_options={"cpp.cxx": ("/nonexistent/compiler",)})
    found = fit(tmp_path, callback, Regressor())
    assert found["graphs"][0]["fallback"].startswith("eager mode runs")
    assert any("eager mode runs" in remark for remark in found["remarks"])
    assert found["gain"]["qps"] is not None, "measured, and the remark says of what"


def test_a_user_error_is_not_swallowed(tmp_path: Path) -> None:
    class Diverges(Regressor):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.trainer.global_step == 9:
                raise FloatingPointError("the loss is not finite")
            return self.net(x)

    module = Diverges()
    callback = optimus(target="")
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer(tmp_path, callback).fit(module, loader(14))
    assert "_compiled_call_impl" not in module.__dict__
    assert (tmp_path / "optimus_summary.json").exists()
    assert "FloatingPointError" in (tmp_path / "optimus_summary.json").read_text()


def test_an_error_while_measuring(tmp_path: Path) -> None:
    def broken(batch: Any) -> int:
        raise LookupError("the batch is not what it was")

    found = fit(tmp_path, optimus(batch_size=broken), Regressor())
    assert found["phases"]["baseline"]["windows"] == []
    assert any("measuring stopped: LookupError" in remark for remark in found["remarks"])
    assert found["graphs"], "the optimised graph took over all the same"


def test_an_error_at_the_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no room for graphs")

    monkeypatch.setattr(takeover, "CompiledTargets", broken)
    with pytest.warns(UserWarning, match=r"Optimus gave up.*no room for graphs"):
        found = fit(tmp_path, optimus(), Regressor())
    assert any("gave up at step 2" in remark for remark in found["remarks"])
    assert found["gain"]["qps"] is None


def test_an_error_while_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trainer: Trainer, metrics: dict[str, float]) -> None:
        raise RuntimeError("this logger takes no qps")

    monkeypatch.setattr(Logbook, "_to_loggers", staticmethod(broken))
    with pytest.warns(UserWarning, match="Optimus gave up.*takes no qps"):
        fit(tmp_path, optimus(), Regressor())


def test_a_full_disk_costs_the_summary_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not write its summary"):
        fit(tmp_path, optimus(summary_dir=tmp_path / "file" / "below"), Regressor())

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        summary.write({}, tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.glob("*.part")) == []


def test_a_model_that_calls_no_module(tmp_path: Path) -> None:
    class Raw(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            weight = self.net.top.weight[:, :8]
            return (torch.nn.functional.linear(batch[0], weight) - batch[1]).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="lightning")
        found = fit(tmp_path, optimus(), Raw())
    assert found["targets"] == []
    assert found["gain"]["qps_note"] == "nothing is compiled"
    assert any("no module was called" in remark for remark in found["remarks"])


def test_a_target_that_torch_compile_ignores_is_reported(tmp_path: Path) -> None:
    class Recurrent(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 4)
            self.head = nn.Sequential(nn.Linear(4, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out, _ = self.rnn(batch[0])
            return (self.head(out) - batch[1]).square().mean()

    found = fit(tmp_path, optimus(target=["rnn", "head"]), Recurrent())
    assert (
        "optimised: rnn: torch.compile made no graph of it, so it runs uncompiled"
        in (found["remarks"])
    )
    assert not [r for r in found["remarks"] if "head" in r]
