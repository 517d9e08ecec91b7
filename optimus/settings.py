"""What a user asks of Optimus for one training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, cast, get_args

from optimus.backend import OptimusBackend
from optimus.capture import Graphs
from optimus.names import nearest
from optimus.packing import Packing
from optimus.partitioning import Recompute

Baseline = Literal["compile", "eager", "off"]
PhaseName = Literal["baseline", "optimised"]
CudaGraphs = Literal["off", "model", "step"]

_INDUCTORS_OWN = "triton.cudagraphs"


@dataclass(frozen=True)
class Settings:
    """The arguments of OptimusCallback, which says what each means.

    Raises ValueError for what could never work, naming what would.
    """

    patterns: str | Sequence[str] = "all"
    disable: Sequence[str] = ()
    knobs: Mapping[str, Mapping[str, Any]] | None = None
    target: Any = None
    baseline: Baseline = "compile"
    baseline_steps: int = 80
    warmup_steps: int = 10
    window: int = 10
    inner: str = "inductor"
    inner_options: Mapping[str, Any] | None = None
    dynamic: bool | None = None
    verify: bool = True
    recompute: Recompute = "auto"
    packing: bool = True
    cuda_graphs: CudaGraphs = "off"
    explain: str | Sequence[str] | None = None
    batch_size: int | Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        if self.baseline not in get_args(Baseline):
            valid = ", ".join(get_args(Baseline))
            raise ValueError(f"unknown baseline {self.baseline!r}; valid: {valid}")
        least = {"baseline_steps": 0, "warmup_steps": 1, "window": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {getattr(self, name)}")
        if isinstance(self.batch_size, int) and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        self._check_cuda_graphs()
        self.backend("optimised")

    def _check_cuda_graphs(self) -> None:
        # YAML reads a bare `off` as False.
        if cast("Any", self.cuda_graphs) is False:
            object.__setattr__(self, "cuda_graphs", "off")
        nearest("cuda_graphs", self.cuda_graphs, get_args(CudaGraphs))
        if self.cuda_graphs == "model" and self.inner != "inductor":
            raise ValueError(f"cuda_graphs=model is Inductor's; inner={self.inner!r} has none")
        if self.cuda_graphs != "off" and _INDUCTORS_OWN in (self.inner_options or {}):
            raise ValueError(
                f"cuda_graphs={self.cuda_graphs} and inner_options[{_INDUCTORS_OWN!r}] both say "
                "what runs as CUDA graphs: leave one of them out"
            )

    def backend(
        self,
        phase: PhaseName,
        packing: Packing | None = None,
        graphs: Graphs | None = None,
    ) -> OptimusBackend:
        """A new backend for a phase. Raises ValueError for unknown patterns, knobs and inners."""
        patterns, disable, knobs = self.patterns, self.disable, self.knobs
        if phase == "baseline":
            patterns, disable, knobs = "none", (), None
        return OptimusBackend(
            patterns,
            disable=disable,
            knobs=knobs,
            inner=self.inner,
            inner_options=self._inner_options(phase),
            verify=self.verify,
            recompute=self.recompute if phase == "optimised" else False,
            packing=packing,
            graphs=graphs,
            explain=self.explain if phase == "optimised" else None,
        )

    def _inner_options(self, phase: PhaseName) -> dict[str, Any]:
        options = dict(self.inner_options or {})
        if phase == "optimised" and self.cuda_graphs != "off" and self.inner == "inductor":
            options[_INDUCTORS_OWN] = self.cuda_graphs == "model"
        return options

    @cached_property
    def selects_nothing(self) -> bool:
        """Whether no pattern is left to run. Kept: it is asked for in every window of a run."""
        return not self.backend("optimised").selection

    @property
    def no_baseline(self) -> str:
        """Why the optimised graph runs from the first step; empty when a baseline comes first."""
        if self.selects_nothing:
            return "no pattern is selected"
        return "" if self.baseline != "off" and self.baseline_steps else "the baseline is off"

    @property
    def takeover_step(self) -> int:
        """The step from which the optimised graph runs."""
        return 0 if self.no_baseline else self.baseline_steps

    @property
    def steps_to_measure(self) -> int:
        """Steps that a phase needs for one window: the targets are found and compiled first."""
        return 2 + self.warmup_steps + self.window

    def runs(self, phase: PhaseName) -> str:
        """What executes in a phase, in words."""
        plain = f"torch.compile ({self.inner})"
        if phase == "baseline":
            return "eager" if self.baseline == "eager" else plain
        plain += {"model": ", CUDA graphs", "step": ", steps as CUDA graphs"}.get(
            self.cuda_graphs, ""
        )
        if self.selects_nothing:
            return f"{plain}, no pattern selected"
        names = [self.patterns] if isinstance(self.patterns, str) else self.patterns
        without = f" without {', '.join(self.disable)}" if self.disable else ""
        return f"Optimus ({', '.join(names)}{without}), then {plain}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the summary; modules and functions are left out."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value
        return {str(k): _plain(v) for k, v in mapping.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        sequence: Sequence[Any] = value
        return [_plain(v) for v in sequence]
    return value if isinstance(value, (str, int, float, bool)) else None
