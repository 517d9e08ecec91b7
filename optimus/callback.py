"""OptimusCallback: `Trainer(callbacks=[OptimusCallback(patterns="all")])`, and nothing else.

The first steps of training run under plain `torch.compile`, then the optimised graph takes over;
both are measured, and the difference is logged. The LightningModule is not changed, and a
checkpoint loads without Optimus.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimus import summary
from optimus.capture import Capture
from optimus.explain import write_explanations
from optimus.gradient_readers import optimizers_for_packs
from optimus.lightnings import accepted_by_both, plain_class
from optimus.logbook import Logbook, say
from optimus.lookup import report
from optimus.partitioning import Recompute
from optimus.run_graphs import graphs_for
from optimus.settings import Baseline, CudaGraphs, Settings
from optimus.takeover import Takeover
from optimus.targets import describe

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:  # only the older package of the same code is installed
        from pytorch_lightning import Callback


def _never_stops_training(hook: Callable[..., None]) -> Callable[..., None]:
    """An error of Optimus in a hook ends Optimus, not the run."""

    @functools.wraps(hook)
    def safe(
        self: OptimusCallback, trainer: Trainer, pl_module: LightningModule, *args: Any, **kw: Any
    ) -> None:
        try:
            hook(self, trainer, pl_module, *args, **kw)
        except Exception as error:  # whatever it is, the run goes on
            self.give_up(error)

    return safe


class OptimusCallback(Callback):
    """Trains a LightningModule with Optimus, and says what that gained.

    Args:
        patterns: "all", "vertical", "horizontal", "none", the name of a pattern, or a list of them.
        disable: Names of patterns to leave out.
        knobs: Settings of single patterns, `{pattern: {knob: value}}`.
        target: What to compile: a dotted name of a sub-module or of a method, or a sub-module, or
            several. By default the module's `compile_targets`, else the modules that
            `training_step` is seen to call in the first step. A method that calls the layers and
            returns the loss and, detached, the predictions, has all of backward in one graph.
        baseline: What the first steps run under: "compile" (plain torch.compile), "eager" or "off".
        baseline_steps: Training batches that the baseline lasts.
        warmup_steps: Steps of each phase that are not measured.
        window: Steps over which throughput and peak memory are taken.
        inner: The compiler of the rewritten graph: "inductor", "aot_eager" or "eager".
        inner_options: Inductor's config entries.
        dynamic: As in torch.compile: None lets sizes become dynamic when they change.
        verify: Run a rewritten graph beside the original on the first batch, and leave out patterns
            that change its result.
        recompute: Make in Inductor's backward pass anew what takes no GEMM to make (casts of
            weights, activations) rather than keep it: less is kept, more is computed. "auto"
            chooses for each graph by an estimate of the memory it needs.
        packing: Store parameters that the rewritten graph stacks as one tensor; where the optimizer
            updates element by element and nothing reads single gradients, it steps on them as one.
        cuda_graphs: "off"; "model": Inductor's CUDA graphs of what is compiled; "step": compiled
            graphs, forward and backward, and optimizers' steps are replayed as CUDA graphs
            (optimus.step_graphs). What cannot be stays outside, with the reason in the summary.
        explain: Patterns to explain in optimus_explain_NAME.txt and .svg beside the summary.
        batch_size: Samples in a batch, or a function that tells them for a batch. By default they
            are read off the batch.
        summary_dir: Where optimus_summary.json and .html are written at the end; by default the
            folder of the Trainer's first logger, without one the Trainer's `default_root_dir`
            (the current directory, unless the Trainer was given one). A line says where.

    Logs, at the end of a window, at most every `log_every_n_steps` and once more when an epoch
    ends: of that window `qps` (samples a second over all ranks), `qps_p10`, `qps_p50` and `qps_p90`
    (of the single steps in it) and peak memory in MiB; over all windows of the phase so far
    `optimus/qps` (their median), `optimus/qps_gain` and `optimus/peak_memory_gain` (against the
    baseline's medians, as fractions; more is better for both), kernels a step, recompiles, and
    compile seconds. The last gain logged is the one that the summary has;
    `optimus/qps_gain_doubts` is the number of reasons to doubt it, which the last line and the
    summary say in words. A figure that could not be measured is not logged.

    Raises ValueError for anything that is misspelt, before training begins.
    """

    # What records CUDA graphs: None for that of the Trainer's device.
    capture: Capture | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> OptimusCallback:
        """An instance that the Trainer in use accepts, `lightning`'s or `pytorch_lightning`'s."""
        accepted: Any = accepted_by_both  # the cache is typed for hashable instances only
        return object.__new__(accepted(cls, sys.modules.get("pytorch_lightning")))

    def __init__(
        self,
        patterns: str | Sequence[str] = "all",
        *,
        disable: Sequence[str] = (),
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
        target: Any = None,
        baseline: Baseline = "compile",
        baseline_steps: int = 80,
        warmup_steps: int = 10,
        window: int = 10,
        inner: str = "inductor",
        inner_options: Mapping[str, Any] | None = None,
        dynamic: bool | None = None,
        verify: bool = True,
        recompute: Recompute = "auto",
        packing: bool = True,
        cuda_graphs: CudaGraphs = "off",
        explain: str | Sequence[str] | None = None,
        batch_size: int | Callable[[Any], int] | None = None,
        summary_dir: str | Path | None = None,
    ) -> None:
        self.settings = Settings(
            patterns=patterns,
            disable=disable,
            knobs=knobs,
            target=target,
            baseline=baseline,
            baseline_steps=baseline_steps,
            warmup_steps=warmup_steps,
            window=window,
            inner=inner,
            inner_options=inner_options,
            dynamic=dynamic,
            verify=verify,
            recompute=recompute,
            packing=packing,
            cuda_graphs=cuda_graphs,
            explain=explain,
            batch_size=batch_size,
        )
        self._summary_dir = Path(summary_dir) if summary_dir is not None else None
        self._takeover: Takeover | None = None
        self._saved: dict[str, Any] = {}
        self._stage = ""
        self._directory: Path | None = None
        self._logbook: Logbook | None = None

    # ---- what came of it -------------------------------------------------------------------------

    @property
    def takeover(self) -> Takeover | None:
        """The course of the run: phases, targets, pattern report; None before it began."""
        return self._takeover

    def summary(self, status: str = "running") -> dict[str, Any]:
        """What the summary file says, as plain data; empty before a run began."""
        return summary.collect(self._takeover, status) if self._takeover is not None else {}

    # ---- saved state -----------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint."""
        return "OptimusCallback"

    def state_dict(self) -> dict[str, Any]:
        """Plain data: a checkpoint loads without Optimus."""
        return self._takeover.state() if self._takeover is not None else self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was written; one that is only evaluated sets nothing back."""
        if self._takeover is not None and self._stage != "fit":
            return
        self._saved = dict(state_dict)
        if self._takeover is not None:
            self._takeover.finish()
            self._takeover = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled and copied as what it was asked for, without what a run has made."""
        fresh = {"_takeover": None, "_logbook": None, "_saved": self.state_dict()}
        return _blank, (plain_class(type(self)),), self.__dict__ | fresh

    # ---- fit -------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember what a checkpoint is loaded for."""
        self._stage = stage

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the targets that are named, and put back what a checkpoint says was in place."""
        # All ranks must ask for the folder together, so not at the end, where one may be missing.
        folder = self._summary_dir or trainer.log_dir or trainer.default_root_dir
        self._directory = Path(folder).resolve()
        self._begin(trainer, pl_module).resume()

    @_never_stops_training
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say early when the run is too short to measure a gain."""
        takeover = self._begin(trainer, pl_module)
        batches = trainer.num_training_batches * float(trainer.max_epochs or 1)
        needed = takeover.takeover_step + self.settings.steps_to_measure
        if 0 < batches < needed and not self.settings.no_baseline:
            takeover.note(
                f"this run has {batches:.0f} training batches, too few to measure a gain: that "
                f"takes {needed} with baseline_steps={self.settings.baseline_steps}"
            )

    @_never_stops_training
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Put the step's phase in place."""
        self._begin(trainer, pl_module).begin_step()
        self._book.begin_step(trainer)

    @_never_stops_training
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the step and log what there is to log."""
        takeover = self._begin(trainer, pl_module)
        windows = takeover.end_step(batch)
        self._book.end_step(trainer, windows)

    @_never_stops_training
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the figures as they stand; the time between two epochs is no training step's."""
        if self._takeover is not None:
            self._takeover.interrupt()
            self._book.end_epoch(trainer, self._takeover.read())

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Writing a checkpoint is no part of a step either."""
        if self._takeover is not None:
            self._takeover.interrupt()

    @_never_stops_training
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was not read before."""
        if self._takeover is not None:
            self._book.end_epoch(trainer, self._takeover.finish())

    @_never_stops_training
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what it gained, and write the summary."""
        takeover = self._begin(trainer, pl_module)
        self._book.tell(trainer, True)
        say(trainer, summary.gain_line(takeover))
        self._write(trainer, "finished")

    @_never_stops_training
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the model as it was, and a summary of what was measured."""
        if self._takeover is not None:
            self._book.end_wait()
            self._takeover.finish()
            self._write(trainer, f"stopped by {describe(exception)}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the model as it was."""
        if self._takeover is not None:
            self._book.end_wait()
            self._takeover.finish()

    # ---- validation, test, predict ---------------------------------------------------------------

    @_never_stops_training
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inside fit the phase goes on; alone, the optimised graph runs."""
        takeover = self._begin(trainer, pl_module)
        if _fitting(trainer):
            takeover.evaluate(bool(trainer.sanity_checking))
        else:
            takeover.evaluate_only()
        self._book.begin_evaluation(trainer)

    @_never_stops_training
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to training."""
        if _fitting(trainer):
            self._begin(trainer, pl_module).end_evaluation()

    @_never_stops_training
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the optimised graph."""
        self._begin(trainer, pl_module).evaluate_only()
        self._book.begin_evaluation(trainer)

    on_predict_start = on_test_start

    @_never_stops_training
    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Without targets yet, see what the first batch calls."""
        takeover = self._begin(trainer, pl_module)
        if takeover.targets is None and not _fitting(trainer):
            takeover.observe()

    @_never_stops_training
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Compile what the first batch called."""
        takeover = self._begin(trainer, pl_module)
        self._book.end_wait()
        if not _fitting(trainer):
            takeover.end_observation()
            takeover.evaluate_only()
            self._book.begin_evaluation(trainer)

    on_validation_batch_start = on_predict_batch_start = on_test_batch_start
    on_validation_batch_end = on_predict_batch_end = on_test_batch_end

    # ---- inside ----------------------------------------------------------------------------------

    def give_up(self, error: BaseException) -> None:
        """Something in Optimus failed: warn, and let the run go on without it."""
        warnings.warn(f"Optimus gave up and the run goes on without: {error!r}", stacklevel=3)
        if self._takeover is not None:
            self._takeover.abandon(error)

    @property
    def _book(self) -> Logbook:
        assert self._logbook is not None, "made with the takeover"
        return self._logbook

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> Takeover:
        """The takeover of this model, begun on first use."""
        if self._takeover is not None and self._takeover.root is pl_module:
            return self._takeover
        if self._takeover is not None:
            self._book.end_wait()
            self._takeover.finish()
        saved, self._saved = self._saved, {}
        device, world_size = trainer.strategy.root_device, trainer.world_size
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        self._takeover = Takeover(
            self.settings,
            pl_module,
            device,
            world_size,
            saved,
            optimizers=lambda: optimizers_for_packs(trainer, pl_module, others),
            graphs=lambda: graphs_for(self.settings, trainer, pl_module, self.capture),
        )
        self._logbook = Logbook(self._takeover, saved.get("notes", ()))
        return self._takeover

    def _write(self, trainer: Trainer, status: str) -> None:
        """Write the summary files on rank 0; a full disk is worth a warning only."""
        fast_dev_run = bool(getattr(trainer, "fast_dev_run", False))
        if self._directory is None or not trainer.is_global_zero or fast_dev_run:
            return
        try:
            page = summary.write(self.summary(status), self._directory)
            say(trainer, f"summary in {page}")
            for file in write_explanations(report(self), self._directory):
                say(trainer, f"explained in {file}")
        except OSError as error:
            warnings.warn(f"Optimus could not write its summary: {error}", stacklevel=2)


def _fitting(trainer: Trainer) -> bool:
    return trainer.state.fn == "fit"


def _blank(cls: type[OptimusCallback]) -> OptimusCallback:
    """What pickle fills in."""
    return cls.__new__(cls)
