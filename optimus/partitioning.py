"""Choose what is saved for backward by an estimate of what a step then holds and moves.

PyTorch's min-cut partitioner makes the least of what is saved, by rules of what is worth making
anew. They know one tensor at a time: a result that is saved as a view beside the mask made of it,
or the copies of a stack, count little then, and are much of what is alive at the peak. Here it
runs under several rules, which takes a few hundredths of a second each, and the result is taken for
which the estimate (optimus.peak_memory) is least.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

from torch._functorch import config
from torch.fx import GraphModule

from optimus import peak_memory
from optimus.driver import copy_graph_module

try:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
except ImportError:  # a later PyTorch may not have it
    CustomPartitionerFn = object  # type: ignore[assignment, misc]

log = logging.getLogger(__name__)

Recompute = bool | Literal["auto"]
Rules = Mapping[str, bool]
"""Entries of torch._functorch.config; private ones, which a later PyTorch may not have."""
Halves = tuple[GraphModule, GraphModule]

_ANEW: Rules = {"ban_recompute_materialized_backward": False}
"""What backward hands to a GEMM may be made anew, too, if that takes no GEMM."""
_NO_VIEWS: Rules = {"recompute_views": True}
"""What is saved is never a view, so that all else that is made of the tensor can be made anew."""
_ALL_RULES: tuple[Rules, ...] = ({}, _NO_VIEWS, _ANEW, {**_NO_VIEWS, **_ANEW})

BYTES_MOVED = 6
"""How many bytes more may be moved in a step for each byte less that it holds. What there is to
choose from in the benchmark models costs 1 to 4.4, or 9 and more."""


def _have(rules: Rules) -> bool:
    return all(hasattr(config, name) for name in rules)


def saving(less: bool) -> AbstractContextManager[Any]:
    """What a compile saves for backward: as ever or, without an estimate, `less`."""
    if less and _have(_ANEW):
        return cast(AbstractContextManager[Any], config.patch(dict(_ANEW)))
    if less:
        log.warning("recompute: this PyTorch has no %s, the backward pass is as ever", *_ANEW)
    return nullcontext()


class PartitionByEstimate(CustomPartitionerFn):
    """Inductor's `custom_partitioner_fn`. Stateless: caches of compiled code pickle it."""

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Halves:
        """The forward and the backward half of a joint graph."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        best: Halves | None = None
        least = math.inf
        for rules in filter(_have, _ALL_RULES):
            with config.patch(dict(rules)):
                halves = min_cut_rematerialization_partition(
                    copy_graph_module(gm), joint_inputs, **kwargs
                )
            cost = _cost(halves)
            if best is None or cost < least:
                best, least = halves, cost
        return cast(Halves, best)

    def uuid(self) -> bytes:
        """What the result depends on besides the graph."""
        from torch._inductor.custom_graph_pass import get_hash_for_files

        return get_hash_for_files((__file__, peak_memory.__file__))


def _cost(halves: Halves) -> float:
    try:
        found = peak_memory.estimate(halves[0].graph, halves[1].graph)
    except Exception as error:  # then it is as ever
        log.debug("no estimate of what a step holds", exc_info=error)
        return math.inf
    return found.peak + found.moved / BYTES_MOVED


def inductor_options() -> dict[str, Any]:
    """Entries of Inductor's config that have it partition by the estimate, if it lets others do
    so."""
    from torch._inductor import config as inductor

    if not hasattr(inductor, "custom_partitioner_fn"):
        return {}
    return {"custom_partitioner_fn": PartitionByEstimate()}
