"""The course of a training run: first the baseline, then the optimised graph takes over.

Which phase a step runs in depends on the step's number and the saved state only, never on what was
measured, so that a resumed run computes what an uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from optimus.backend import OptimusBackend
from optimus.capture import Graphs
from optimus.discovery import CallObserver
from optimus.figures import Phase, Window
from optimus.gain import Gain, gain
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing
from optimus.recorder import Recorder
from optimus.records import Report
from optimus.settings import PhaseName, Settings
from optimus.targets import CompiledTargets, Target, describe, named_targets

STATE_VERSION = 1
MANY_TARGETS = 8


@dataclass(frozen=True)
class ChosenGraphs:
    """The CUDA graphs of a run, and what tells the optimizers whose steps they may replace.

    `objection` says why there are none though they were asked for.
    """

    graphs: Graphs | None = None
    optimizers: Callable[[], Sequence[Optimizer]] = tuple
    objection: str = ""

    def remarks(self) -> Iterator[str]:
        """What the user should know."""
        if self.objection:
            yield f"cuda_graphs=step fell back to off: {self.objection}"
        if self.graphs is not None:
            yield from self.graphs.remarks()


class Takeover:
    """Runs the phases of one model's training, and has them measured.

    `saved` is an earlier `state()`. `optimizers` returns those that may step on packs of parameters
    as one; it is asked when the optimised graph is compiled. `graphs` gives the CUDA graphs to use
    and the optimizers for them; it is asked then, too. Steps count training batches. Raises
    ValueError for targets that the model does not have.
    """

    def __init__(
        self,
        settings: Settings,
        root: nn.Module,
        device: torch.device,
        world_size: int = 1,
        saved: Mapping[str, Any] | None = None,
        *,
        optimizers: Callable[[], Sequence[Optimizer]] = tuple,
        graphs: Callable[[], ChosenGraphs] = ChosenGraphs,
    ) -> None:
        self.settings = settings
        self.root = root
        self.step = 0
        self.takeover_step = settings.takeover_step
        self.notes: list[str] = []
        self.targets: list[Target] | None = None
        self.recorder = Recorder(settings, device, world_size, self.note)
        self._compiled: dict[PhaseName, CompiledTargets] = {}
        self._installed: PhaseName | None = None
        self._observer: CallObserver | None = None
        self._optimizers = optimizers
        self._choose_graphs = graphs
        self._graphs = ChosenGraphs()
        self._packing = Packing()
        self._packer: PackedOptimizer | None = None
        self._restore(saved or {})

    def phase_at(self, step: int) -> PhaseName:
        """The phase that training step number `step` belongs to."""
        return "baseline" if step < self.takeover_step else "optimised"

    @property
    def compiled(self) -> CompiledTargets | None:
        """What is in place of the model's own calls now; None if nothing is."""
        return self._compiled[self._installed] if self._installed else None

    @property
    def report(self) -> Report:
        """What the patterns did to the graphs compiled so far."""
        compiled = self._compiled.get("optimised")
        return cast("OptimusBackend", compiled.backend).report if compiled else Report()

    # ---- training --------------------------------------------------------------------------------

    def resume(self) -> None:
        """Put in place what was in place when the state was saved."""
        if self.step and self.targets is not None:
            self._install(self.phase_at(self.step - 1))

    def begin_step(self) -> None:
        """Call before a training step."""
        step, phase = self.step, self.phase_at(self.step)
        self.step += 1
        if self.targets is None:
            self.observe()
        else:
            self._install(phase)
        if self._graphs.graphs is not None:
            self._graphs.graphs.begin_step()
        self.recorder.begin_step(phase, step, self._compiled.get(phase))

    def end_step(self, batch: Any) -> list[Window]:
        """Call after a training step on `batch`; the windows that can be read now."""
        self.end_observation()
        if self._graphs.graphs is not None:
            self._graphs.graphs.end_step()
        return self.recorder.end_step(self.step - 1, batch)

    def read(self) -> list[Window]:
        """The full windows not read before, once the device has finished them."""
        return self.recorder.read()

    def finish(self) -> list[Window]:
        """Take everything out of the model; the windows not read before."""
        if self._observer is not None:
            self._observer.detach()
            self._observer = None
        self._uninstall()
        self._unpack()
        return self.recorder.finish()

    def abandon(self, error: BaseException) -> None:
        """Something in here failed: leave the model as it was and stay out of the way."""
        self.note(f"gave up at step {self.step}: {describe(error)}; the model runs as it was")
        self.finish()
        self.targets = []
        self._compiled.clear()

    # ---- other than training ---------------------------------------------------------------------

    def observe(self) -> None:
        """Watch what is called from now on, to choose the targets among it."""
        if self._observer is None:
            self._observer = CallObserver(self.root)
            self._observer.attach()

    def end_observation(self) -> None:
        """Choose the targets among what was called since `observe`."""
        observer, self._observer = self._observer, None
        if observer is None:
            return
        observer.detach()
        self.targets, refused = observer.choose()
        if not self.targets:
            why = "; ".join(refused) or "no module was called"
            self.note(f"found nothing to compile ({why}); name it with target=")
        if len(self.targets) > MANY_TARGETS:
            self.note(
                f"{len(self.targets)} modules are compiled one by one, because training_step calls "
                "them one by one; called from one module's forward they could be merged"
            )

    def evaluate(self, sanity_check: bool = False) -> None:
        """Validation begins: it runs compiled once the optimised graph has taken over."""
        self.interrupt()
        if self._installed:
            active = self._installed == "optimised" and not sanity_check
            self._compiled[self._installed].activate(active)

    def end_evaluation(self) -> None:
        """Training goes on after validation."""
        if self._installed:
            self._compiled[self._installed].activate(True)

    def evaluate_only(self) -> None:
        """Put the optimised graph in place for a run without training."""
        if self.targets is not None:
            self._install("optimised")

    def interrupt(self) -> None:
        """Something other than a training step happens next and is not measured."""
        self.recorder.interrupt()

    # ---- what came of it -------------------------------------------------------------------------

    def gain(self) -> Gain:
        """The optimised phase against the baseline, as far as measured."""
        phases = self.recorder.phases
        missing = "" if "baseline" in phases else self.settings.no_baseline
        if self.targets == []:
            missing = "nothing is compiled"
        if missing:
            return Gain(qps_note=missing, memory_note=missing)
        return gain(phases.get("baseline"), phases.get("optimised", Phase("optimised")))

    def note(self, text: str) -> None:
        """Remember something that the user should know."""
        if text not in self.notes:
            self.notes.append(text)

    def remarks(self) -> list[str]:
        """Everything that the user should know, in words."""
        compiled = [f"{n}: {r}" for n, c in self._compiled.items() for r in c.remarks()]
        fallbacks = [f"graph {g.index}: {g.fallback}" for g in self.report.graphs if g.fallback]
        unpacked = [f"packing: {r} ({n} times)" for r, n in self._packing.declined.items()]
        graphs = self._graphs.remarks()
        return list(dict.fromkeys([*self.notes, *compiled, *fallbacks, *unpacked, *graphs]))

    def graphs_to_dict(self) -> dict[str, Any]:
        """What ran as CUDA graphs, as plain data."""
        found = self._graphs.graphs
        return {
            "cuda_graphs": self.settings.cuda_graphs,
            "objection": self._graphs.objection,
            **(found.to_dict() if found is not None else {}),
        }

    def state(self) -> dict[str, Any]:
        """Plain data from which a run goes on exactly."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "takeover_step": self.takeover_step,
            "targets": None if self.targets is None else [t.name for t in self.targets],
            "phases": {name: phase.to_dict() for name, phase in self.recorder.phases.items()},
            "notes": list(self.notes),
        }

    # ---- inside ----------------------------------------------------------------------------------

    def _restore(self, saved: Mapping[str, Any]) -> None:
        wanted = self._wanted()
        if wanted is not None:
            self.targets = named_targets(self.root, wanted)
        if saved.get("version", STATE_VERSION) != STATE_VERSION:
            self.note("the checkpoint's Optimus state is of another version and was not used")
            return
        try:
            phases = {n: Phase.from_dict(plain) for n, plain in saved.get("phases", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.note(f"the checkpoint's figures cannot be read: {describe(error)}")
            phases = {}
        for name, phase in phases.items():
            phase.source = "checkpoint"
            self.recorder.phases[name] = phase
        known = [w.process for phase in phases.values() for w in phase.windows]
        self.recorder.process = max(known, default=-1) + 1
        self.step = saved.get("step", 0)
        self.takeover_step = saved.get("takeover_step", self.takeover_step)
        self.notes += saved.get("notes", ())
        if self.targets is None and saved.get("targets") is not None:
            self._restore_targets(saved["targets"])

    def _restore_targets(self, names: list[str]) -> None:
        try:
            self.targets = named_targets(self.root, names)
        except ValueError as error:
            self.note(f"the targets in the checkpoint are looked for anew: {error}")

    def _wanted(self) -> Any:
        """Targets that the user or the module names; None to find them out."""
        if getattr(self.root, "_compiler_ctx", None) is not None:  # a private name of Lightning
            self.note("the LightningModule was compiled as a whole; pass it uncompiled to Optimus")
            return []
        if self.settings.target is not None:
            return self.settings.target
        return getattr(self.root, "compile_targets", None)

    def _install(self, phase: PhaseName) -> None:
        if self._installed == phase:
            return
        self._uninstall()
        if phase == "optimised":
            self._drop_baseline()
        if phase not in self._compiled:
            self._compiled[phase] = self._compile(phase)
        elif phase == "optimised":
            self._pack_again()
        self._compiled[phase].install()
        self._installed = phase
        if phase == "optimised" and self._graphs.graphs is not None:
            self._graphs.graphs.install(self._graphs.optimizers())

    def _uninstall(self) -> None:
        if self._graphs.graphs is not None:
            self._graphs.graphs.release()
        if self._installed:
            self._compiled[self._installed].uninstall()
        self._installed = None

    def _drop_baseline(self) -> None:
        """Free the baseline's graphs, so that their memory is not counted as the other's."""
        baseline = self._compiled.pop("baseline", None)
        for remark in baseline.remarks() if baseline else ():
            self.note(f"baseline: {remark}")

    def _compile(self, phase: PhaseName) -> CompiledTargets:
        eager = phase == "baseline" and self.settings.baseline == "eager"
        targets = [] if eager else self.targets or []
        packing = None
        if phase == "optimised" and self.settings.packing:
            packing = self._packing
            self._pack_again()
        if phase == "optimised":
            self._graphs = self._choose_graphs()
        graphs = self._graphs.graphs
        backend = cast("Any", self.settings.backend(phase, packing, graphs))
        compiled = CompiledTargets(targets, backend, phase, self.settings.dynamic)
        if graphs is not None:
            compiled.recordings = lambda: graphs.recordings
        return compiled

    def _pack_again(self) -> None:
        """Have packs adopted by the optimizers of this run, those made before and new ones."""
        optimizers = self._optimizers()
        self._packer = PackedOptimizer(optimizers) if optimizers else None
        self._packing.adopt = self._packer.adopt if self._packer is not None else None
        for pack in self._packing.packs:
            pack.restore()
            if self._packing.adopt is not None:
                self._packing.adopt(pack)

    def _unpack(self) -> None:
        """Give the parameters and the optimizers' state the places they had.

        The packs are kept: compiled graphs take them, and may be called again.
        """
        if self._packer is not None:
            self._packer.release()
            self._packer = None
        for pack in self._packing.packs:
            pack.dissolve()
