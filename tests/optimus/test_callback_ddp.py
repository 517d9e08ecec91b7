"""OptimusCallback on two ranks: same phases, gradients still averaged, one summary."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import processes

PROGRAM = """
    import json, sys
    from pathlib import Path
    import torch
    from optimus.callback import OptimusCallback
    from tests.optimus.foreign_modules import Gan, Regressor, loader, trainer
    path = Path(sys.argv[1])
    for module_class in (Regressor, Gan):
        weights = {}
        for name in ("plain", "optimus"):
            torch.manual_seed(3)
            callback = OptimusCallback(
                baseline_steps=8, warmup_steps=1, window=2, inner="aot_eager")
            module = module_class()
            strategy = "ddp_find_unused_parameters_true" if module_class is Gan else "ddp"
            fit = trainer(path / module_class.__name__ / name,
                          *([callback] if name == "optimus" else []),
                          devices=2, strategy=strategy, max_epochs=2)
            fit.fit(module, loader(16), loader(4))
            weights[name] = torch.cat([p.detach().flatten() for p in module.parameters()])
        result = {
            "difference": float((weights["plain"] - weights["optimus"]).abs().max()),
            "sum": float(weights["optimus"].double().sum()),
            "summary": callback.summary(),
            "left": [n for n, m in module.named_modules() if "_compiled_call_impl" in m.__dict__],
        }
        name = f"{module_class.__name__}_{fit.global_rank}.json"
        (path / name).write_text(json.dumps(result))
    torch.distributed.barrier()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two gloo ranks left what they found."""
    path = tmp_path_factory.mktemp("ddp")
    program = path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    # The second rank is started as Lightning does that for users.
    real = {processes.PYTHON: sys.executable}
    done = processes.run([sys.executable, program, path], timeout=400, forked=True, **real)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return path


def results(ranks: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((ranks / f"{name}_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Regressor", "Gan"])
def test_training_is_that_of_plain_ddp(ranks: Path, name: str) -> None:
    zero, one = results(ranks, name)
    assert zero["difference"] < 1e-5
    assert zero["sum"] == one["sum"], "the ranks have the same weights"
    assert zero["left"] == one["left"] == []


@pytest.mark.slow
def test_the_model_is_compiled_and_not_the_training_step(ranks: Path) -> None:
    # Lightning calls training_step through the module's own forward under DDP.
    for result in results(ranks, "Regressor"):
        assert result["summary"]["targets"] == ["Regressor"]
        assert result["summary"]["phases"]["optimised"]["graphs"] >= 1
        assert result["summary"]["graphs"][0]["nodes_before"] > 10
        assert result["summary"]["remarks"] == []
    for result in results(ranks, "Gan"):
        assert result["summary"]["targets"] == ["generator", "discriminator"]


@pytest.mark.slow
def test_figures_are_of_both_ranks_and_written_once(ranks: Path) -> None:
    for name in ("Regressor", "Gan"):
        for result in results(ranks, name):
            phases = result["summary"]["phases"]
            assert phases["baseline"]["world_size"] == 2
            assert phases["baseline"]["windows"][0]["samples"] == 2 * 2 * 4
            assert result["summary"]["gain"]["qps"] is not None
        assert (ranks / name / "optimus" / "optimus_summary.html").exists()
