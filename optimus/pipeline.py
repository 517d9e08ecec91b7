"""PIPELINE, the ordered list of everything Optimus does, and what a user may select of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from optimus.driver import Phase
from optimus.names import nearest as nearest  # noqa: PLC0414 (for those who ask here)
from optimus.pattern import Rewrite
from optimus.patterns.horizontal.batch_batch_norms import BatchBatchNorms
from optimus.patterns.horizontal.batch_layer_norms import BatchLayerNorms
from optimus.patterns.horizontal.batch_linears import BatchLinears
from optimus.patterns.horizontal.batch_matmuls import BatchMatmuls
from optimus.patterns.horizontal.batch_normalizes import BatchNormalizes
from optimus.patterns.horizontal.batch_pointwise import BatchPointwise
from optimus.patterns.horizontal.batch_reductions import BatchReductions
from optimus.patterns.horizontal.batch_rms_norms import BatchRmsNorms
from optimus.patterns.horizontal.batch_softmaxes import BatchSoftmaxes
from optimus.patterns.horizontal.join_shared_weight_linears import JoinSharedWeightLinears
from optimus.patterns.horizontal.mix_experts_where_they_lie import MixExpertsWhereTheyLie
from optimus.patterns.horizontal.sum_matrix_vector_products import SumMatrixVectorProducts
from optimus.patterns.horizontal.widen_shared_input_linears import WidenSharedInputLinears
from optimus.patterns.kernels.decompose_skinny_gemms import DecomposeSkinnyGemms
from optimus.patterns.kernels.fuse_cross_layer import FuseCrossLayer
from optimus.patterns.kernels.fuse_dot_interaction import FuseDotInteraction
from optimus.patterns.kernels.fuse_narrow_mlp import FuseNarrowMlp
from optimus.patterns.kernels.group_linears import GroupLinears
from optimus.patterns.kernels.pad_gemms import PadGemms
from optimus.patterns.kernels.quantize_saved_activations import QuantizeSavedActivations
from optimus.patterns.normalize.canonicalize_calls import CanonicalizeCalls
from optimus.patterns.normalize.count_dims_from_front import CountDimsFromFront
from optimus.patterns.normalize.lower_einsum_to_gemm import LowerEinsumToGemm
from optimus.patterns.normalize.lower_index_to_narrow import LowerIndexToNarrow
from optimus.patterns.normalize.lower_joins_to_cat import LowerJoinsToCat
from optimus.patterns.normalize.lower_matmul_to_linear import LowerMatmulToLinear
from optimus.patterns.normalize.lower_moves_to_permute import LowerMovesToPermute
from optimus.patterns.normalize.lower_parts_to_split import LowerPartsToSplit
from optimus.patterns.normalize.lower_unsqueezed_cat_to_stack import LowerUnsqueezedCatToStack
from optimus.patterns.normalize.merge_selects_to_unbind import MergeSelectsToUnbind
from optimus.patterns.normalize.merge_slices_to_split import MergeSlicesToSplit
from optimus.patterns.normalize.remove_inactive_dropout import RemoveInactiveDropout
from optimus.patterns.vertical.cancel_cat_split import CancelCatSplit
from optimus.patterns.vertical.cancel_split_cat import CancelSplitCat
from optimus.patterns.vertical.cancel_stack_unbind import CancelStackUnbind
from optimus.patterns.vertical.cancel_unbind_stack import CancelUnbindStack
from optimus.patterns.vertical.compose_permutes import ComposePermutes
from optimus.patterns.vertical.copy_saved_pieces import CopySavedPieces
from optimus.patterns.vertical.drop_unused_pieces import DropUnusedPieces
from optimus.patterns.vertical.fold_bias_into_linear import FoldBiasIntoLinear
from optimus.patterns.vertical.fold_consecutive_linears import FoldConsecutiveLinears
from optimus.patterns.vertical.merge_duplicates import MergeDuplicates
from optimus.patterns.vertical.merge_nested_cats import MergeNestedCats
from optimus.patterns.vertical.merge_nested_splits import MergeNestedSplits
from optimus.patterns.vertical.merge_reshapes import MergeReshapes
from optimus.patterns.vertical.merge_runs_in_stack import MergeRunsInStack
from optimus.patterns.vertical.merge_split_stack import MergeSplitStack
from optimus.patterns.vertical.merge_unbind_cat import MergeUnbindCat
from optimus.patterns.vertical.move_reshape_out_of_stack import MoveReshapeOutOfStack
from optimus.patterns.vertical.move_transpose_into_stack import MoveTransposeIntoStack
from optimus.patterns.vertical.remove_noops import RemoveNoops
from optimus.patterns.vertical.remove_single_parts import RemoveSingleParts
from optimus.patterns.vertical.round_before_relu import RoundBeforeRelu
from optimus.patterns.vertical.split_before_unbind import SplitBeforeUnbind
from optimus.registry import Place, Registry, load_entry_points, load_files, placed
from optimus.upstream import NO_COUNTERPART, PRESETS_UPSTREAM, TRANSLATIONS, translated

PIPELINE: tuple[Phase, ...] = (
    Phase(
        "normalize",
        (
            CanonicalizeCalls(),
            RemoveInactiveDropout(),
            LowerPartsToSplit(),
            LowerIndexToNarrow(),
            LowerJoinsToCat(),
            LowerMovesToPermute(),
            CountDimsFromFront(),
            LowerUnsqueezedCatToStack(),
            LowerEinsumToGemm(),
            LowerMatmulToLinear(),
            MergeSlicesToSplit(),
            MergeSelectsToUnbind(),
        ),
    ),
    Phase(
        "vertical",
        (
            RemoveNoops(),
            MergeDuplicates(),
            RemoveSingleParts(),
            MergeReshapes(),
            ComposePermutes(),
            SplitBeforeUnbind(),
            MergeNestedSplits(),
            MergeNestedCats(),
            CancelSplitCat(),
            CancelCatSplit(),
            CancelStackUnbind(),
            CancelUnbindStack(),
            MergeSplitStack(),
            MergeUnbindCat(),
            MoveReshapeOutOfStack(),
            MoveTransposeIntoStack(),
            MergeRunsInStack(),
            FoldBiasIntoLinear(),
            FoldConsecutiveLinears(),
            DropUnusedPieces(),
        ),
    ),
    Phase(
        "horizontal",
        (
            WidenSharedInputLinears(),
            JoinSharedWeightLinears(),
            GroupLinears(),
            BatchLinears(),
            MixExpertsWhereTheyLie(),
            BatchMatmuls(),
            BatchLayerNorms(),
            BatchRmsNorms(),
            BatchBatchNorms(),
            BatchNormalizes(),
            BatchPointwise(),
            BatchSoftmaxes(),
            BatchReductions(),
        ),
    ),
    Phase("kernels", (FuseDotInteraction(), FuseCrossLayer(), FuseNarrowMlp())),
    Phase(
        "finish",
        (
            SumMatrixVectorProducts(),
            DecomposeSkinnyGemms(),
            RoundBeforeRelu(),
            CopySavedPieces(),
            PadGemms(),
            QuantizeSavedActivations(),
        ),
    ),
)
"""Phases in the order they run; a phase is repeated until it changes nothing. Users' own patterns
stand between these: `phases()` has all."""

PRESETS = ("none", "vertical", "horizontal", "kernels", "all")


@dataclass(frozen=True)
class Selection:
    """What runs: phases holding the selected patterns with their knobs, in pipeline order."""

    phases: tuple[Phase, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the selected patterns, normalisations among them, in pipeline order."""
        return tuple(dict.fromkeys(p.name() for phase in self.phases for p in phase.patterns))

    def without(self, names: Collection[str]) -> Selection:
        """The same selection less some patterns."""
        return Selection(
            tuple(
                Phase(phase.name, tuple(p for p in phase.patterns if p.name() not in names))
                for phase in self.phases
            )
        )

    def gradient_errors(self) -> dict[str, float]:
        """Of approximate patterns alone, how far a gradient may be off (Rewrite.gradient_error)."""
        errors = {p.name(): p.gradient_error() for phase in self.phases for p in phase.patterns}
        return {name: error for name, error in errors.items() if error > 0}

    def __bool__(self) -> bool:
        return bool(self.names)


def register(
    pattern: Rewrite,
    *,
    phase: str | None = None,
    before: str | None = None,
    after: str | None = None,
) -> None:
    """Add a pattern of one's own: from now on it takes part wherever Optimus' own do.

    It runs in `phase`, in front of pattern `before` or behind pattern `after`; by default at the
    end of the phase called as its family. Raises TypeError for what is no pattern, and ValueError
    for a name that is taken and for an unknown operation, phase or neighbour.
    """
    phases()  # patterns of installed packages come first
    _register(pattern, Place(phase, before, after))


def _register(pattern: Rewrite, place: Place = Place()) -> None:  # noqa: B008 (frozen)
    name = pattern.name() if isinstance(pattern, Rewrite) else ""
    if name in (*PRESETS, *PRESETS_UPSTREAM, *TRANSLATIONS, *NO_COUNTERPART):
        raise ValueError(f"{name!r} has a meaning in `patterns` already; rename the pattern")
    _registry.add(pattern, place, PIPELINE)


def unregister(name: str) -> None:
    """Take out a pattern that was registered. Raises ValueError for any other name."""
    _registry.remove(name)


def phases() -> tuple[Phase, ...]:
    """PIPELINE with users' own patterns in their places."""
    global _loaded  # noqa: PLW0603
    if not _loaded:
        _loaded = True  # first: what is loaded may register patterns itself
        load_entry_points(_register)
        load_files()
    return _registry.arranged(PIPELINE)


_registry = Registry()
_loaded = False


def patterns_by_name() -> dict[str, Rewrite]:
    """Every pattern once, in pipeline order."""
    return {p.name(): p for phase in phases() for p in phase.patterns}


def pattern_names() -> tuple[str, ...]:
    """Names a user may select: all but the normalisations, which come with any other pattern."""
    return tuple(n for n, p in patterns_by_name().items() if p.family != "normalize")


def select(
    patterns: str | Sequence[str] = "all",
    disable: Sequence[str] = (),
    knobs: Mapping[str, Mapping[str, Any]] | None = None,
) -> Selection:
    """The selection that `patterns` names, less `disable`, with `knobs` set.

    `patterns`: "none", "vertical", "horizontal" (with the vertical clean-up it needs), "kernels",
    "all", the name of a pattern, or a list of these; order does not matter. Approximate patterns
    are selected by their own names alone. `patterns` and
    `disable` may use PyTorch's names (optimus.upstream), too. Raises ValueError naming the nearest
    valid names for anything unknown.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    names = {name for word in wanted for name in _expand(word)}
    disabled = {name for word in disable for name in named(word)}
    names -= disabled
    settings = {nearest("pattern", n, patterns_by_name()): k for n, k in (knobs or {}).items()}
    if names:
        normalisations = {n for n, p in patterns_by_name().items() if p.family == "normalize"}
        names |= normalisations - disabled
    return Selection(
        tuple(
            Phase(
                phase.name,
                tuple(
                    _with_knobs(p, settings.get(p.name(), {}))
                    for p in phase.patterns
                    if p.name() in names
                ),
            )
            for phase in phases()
        )
    )


def select_alone(pattern: Rewrite) -> Selection:
    """The selection of one pattern, registered or not, and of the normalisations."""
    name = pattern.name()
    arranged = phases() if name in patterns_by_name() else placed(pattern, Place(), phases())
    return Selection(
        tuple(
            Phase(
                phase.name,
                tuple(
                    pattern if p.name() == name else p
                    for p in phase.patterns
                    if p.name() == name or p.family == "normalize"
                ),
            )
            for phase in arranged
        )
    )


def named(word: str) -> tuple[str, ...]:
    """The patterns that a name means, one of ours or one of PyTorch's.

    Raises ValueError naming the nearest valid names for an unknown one.
    """
    everything = patterns_by_name()
    if word in everything:
        return (word,)
    meant = translated(word)
    return meant or (nearest("pattern", word, (*everything, *TRANSLATIONS)),)


def _expand(word: str) -> tuple[str, ...]:
    word = PRESETS_UPSTREAM.get(word, word)
    everything = patterns_by_name()
    if word == "none":
        return ()
    if word in PRESETS:
        families = _FAMILIES[word]
        exact = [p for p in everything.values() if p.in_presets and not p.gradient_error()]
        return tuple(p.name() for p in exact if p.family in families)
    valid = (*PRESETS, *everything, *PRESETS_UPSTREAM, *TRANSLATIONS, *NO_COUNTERPART)
    return named(nearest("pattern or preset", word, valid))


# Horizontal rewrites leave unbind/stack pairs that the vertical ones remove.
_FAMILIES = {
    "vertical": ("vertical",),
    "horizontal": ("horizontal", "vertical"),
    "kernels": ("kernels",),
    "all": ("vertical", "horizontal", "kernels"),
}


def _with_knobs(pattern: Rewrite, knobs: Mapping[str, Any]) -> Rewrite:
    if not knobs:
        return pattern
    dataclass: Any = pattern  # every pattern is one
    valid = [f.name for f in dataclasses.fields(dataclass)]
    for name in knobs:
        if not valid:
            raise ValueError(
                f"pattern {pattern.name()!r} has no knobs, so {name!r} is none of them"
            )
        nearest(f"knob of {pattern.name()}", name, valid)
    return cast(Rewrite, dataclasses.replace(dataclass, **knobs))
