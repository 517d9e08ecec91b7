"""What the training loop costs: Lightning and the callbacks of train.py against a bare loop.

    python -m benchmarks.loop --out benchmarks/results/loop.csv

One small DLRM, one data set in memory, one optimizer, three loops that take turns in one process:

- `bare`: forward, backward, optimizer and schedule in a Python loop, nothing else;
- `lightning`: Lightning's Trainer around the same, without callbacks, logger or progress bar;
- `train.py`: the Trainer with all that `python train.py optimus.patterns=none` has in it.

The dense layers are compiled with the loss, alike in all three. A step is timed from the end of the
one before, so loading, metrics and logging count; on a GPU the host runs ahead, so steps are timed
in blocks that end in a synchronisation there. `cpu_ms` is the process's own processor time, which
other work on the machine disturbs little. Overheads are the medians over the bare loop's.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Callback, Trainer

from conf import build, resolvers
from conf.checks import CONF
from recsys.data.criteo_synthetic import CriteoSynthetic
from recsys.data.datamodule import RecDataModule
from recsys.models.dlrm import DLRM
from recsys.module import RecModule
from recsys.optim import JointOptimizer, OptimizerConfig, scheduler

Times = list[tuple[float, float]]

WARM_UP = 30
BLOCK = 10


@dataclass
class Row:
    """One loop. Milliseconds a step: median and deciles over all blocks of all rounds."""

    date: str
    commit: str
    device: str
    torch: str
    lightning: str
    inner: str
    batch: int
    layers: int
    steps: int
    loop: str
    ms: float
    ms_p10: float
    ms_p90: float
    overhead: float
    cpu_ms: float
    cpu_overhead: float


class BlockTimer(Callback):
    """Milliseconds a step, wall-clock and processor, of each `BLOCK` steps after the warm-up."""

    def __init__(self) -> None:
        self.ms: list[tuple[float, float]] = []
        self._steps = 0
        self._began = (0.0, 0.0)

    def end_step(self) -> None:
        """Call when a step and all that belongs to it have ended."""
        self._steps += 1
        if self._steps < WARM_UP or (self._steps - WARM_UP) % BLOCK:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = (time.perf_counter(), time.process_time())
        if self._steps > WARM_UP:
            wall, cpu = (b - a for a, b in zip(self._began, now, strict=True))
            self.ms.append((wall / BLOCK * 1e3, cpu / BLOCK * 1e3))
        self._began = now

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Count the step."""
        self.end_step()


@dataclass(frozen=True)
class Setting:
    """What all loops have in common."""

    batch: int
    layers: int
    steps: int
    inner: str

    @property
    def device(self) -> torch.device:
        """The GPU where there is one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def data(self) -> RecDataModule:
        """Rows in memory: making them is not the loop's work."""
        rows = self.batch * self.steps
        sizes = {"train_rows": rows, "val_rows": self.batch, "test_rows": self.batch}
        return CriteoSynthetic(
            **sizes, max_rows_per_table=1000, in_memory=True, batch_size=self.batch, num_workers=0
        )

    def module(self, data: RecDataModule) -> RecModule:
        """The model with its optimizers; tables fused, as they are on a GPU."""
        torch.manual_seed(0)
        widths = (self.layers,) * 2
        model = partial(DLRM, embedding_dim=16, bottom_layers=widths, over_layers=widths)
        return RecModule(model, data.schema, sparse_arch="fused")


def bare(setting: Setting, folder: Path) -> Times:
    """A loop as one writes it by hand."""
    del folder
    data = setting.data()
    data.setup("fit")
    module = setting.module(data).to(setting.device)
    sparse, dense = module.sparse_optimizer, module.dense_optimizer
    layers = module.model.dense_arch.parameters()
    joint = JointOptimizer(module.model.sparse_arch.fuse(sparse), dense.build(layers, "dense"))
    schedule = scheduler(joint, *[OptimizerConfig.schedule(c, 0) for c in (sparse, dense)])
    compiled = torch.compile(module.loss_and_logits, backend=setting.inner)
    timer = BlockTimer()
    for batch in data.train_dataloader():
        on_device = batch.to(setting.device, non_blocking=True)
        joint.zero_grad()
        embedded = module.model.sparse_arch(on_device.sparse)
        compiled(on_device.dense, embedded, on_device.labels)[0].backward()
        joint.step()
        schedule.step()
        timer.end_step()
    return timer.ms


def lightning_alone(setting: Setting, folder: Path) -> Times:
    """The Trainer and the module, nothing around them."""
    data = setting.data()
    module = setting.module(data)
    module.loss_and_logits = torch.compile(  # type: ignore[method-assign]
        module.loss_and_logits, backend=setting.inner
    )
    timer = BlockTimer()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="auto",
        devices=1,
        max_steps=setting.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timer],
    )
    trainer.fit(module, datamodule=data)
    return timer.ms


def as_train_py(setting: Setting, folder: Path) -> Times:
    """The Trainer as train.py makes it: progress bar, checkpoints, rates, logger, Optimus."""
    data = setting.data()
    module = setting.module(data)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(
            "config",
            overrides=[
                "optimus.patterns=none",
                f"optimus.inner={setting.inner}",
                f"trainer.max_steps={setting.steps}",
                "trainer.precision=32-true",
                "trainer.num_sanity_val_steps=0",
                # A validation or a checkpoint is no step: neither falls into the steps measured.
                "trainer.val_check_interval=1.0",
                "++paths.output=" + str(folder),
            ],
        )
    trainer = build.build_trainer(cfg)
    timer = BlockTimer()
    # Last of all, so that the others' work belongs to the step.
    trainer.callbacks.append(timer)  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=data)
    return timer.ms


LOOPS: dict[str, Callable[[Setting, Path], Times]] = {
    "bare": bare,
    "lightning": lightning_alone,
    "train.py": as_train_py,
}


def measure(setting: Setting, rounds: int, commit: str) -> list[Row]:
    """All loops in turns, `rounds` times over; of several rounds the first counts for nothing."""
    times: dict[str, Times] = {name: [] for name in LOOPS}
    for i in range(rounds):
        for name, loop in LOOPS.items():
            torch._dynamo.reset()
            with TemporaryDirectory() as folder:
                found = loop(setting, Path(folder))
            times[name] += found if i or rounds == 1 else []
    base = _medians(times["bare"])
    return [_row(name, ms, base, setting, commit) for name, ms in times.items()]


def _medians(times: Times) -> tuple[float, float]:
    wall, cpu = zip(*times, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def _row(name: str, times: Times, base: tuple[float, float], setting: Setting, commit: str) -> Row:
    deciles = statistics.quantiles([wall for wall, _ in times], n=10)
    middle, cpu = _medians(times)
    cuda = setting.device.type == "cuda"
    return Row(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit,
        device=torch.cuda.get_device_name() if cuda else platform.machine(),
        torch=torch.__version__,
        lightning=lightning.__version__,
        inner=setting.inner,
        batch=setting.batch,
        layers=setting.layers,
        steps=len(times) * BLOCK,
        loop=name,
        ms=round(middle, 4),
        ms_p10=round(deciles[0], 4),
        ms_p90=round(deciles[-1], 4),
        overhead=round(middle / base[0] - 1, 4),
        cpu_ms=round(cpu, 4),
        cpu_overhead=round(cpu / base[1] - 1, 4),
    )


def append(rows: Sequence[Row], path: Path) -> None:
    """Add `rows` to a CSV file, with a header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--layers", type=int, default=64, help="width of the hidden layers")
    parser.add_argument("--steps", type=int, default=230, help="a round, the warm-up included")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--inner", default="inductor", help="what compiles the dense layers")
    parser.add_argument("--commit", default=_commit(), help="what to call the code measured")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loop.csv"))
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    resolvers.register()
    setting = Setting(options.batch, options.layers, options.steps, options.inner)
    rows = measure(setting, options.rounds, options.commit)
    append(rows, options.out)
    for row in rows:
        print(
            f"{row.loop:10s} {row.ms:8.3f} ms {row.overhead:+8.1%}"
            f" {row.cpu_ms:8.3f} CPU ms {row.cpu_overhead:+8.1%}"
        )


if __name__ == "__main__":
    main()
