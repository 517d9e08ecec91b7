"""PyTorch's names of passes, as the installed version has them, are understood."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from torch._inductor.fx_passes import group_batch_fusion, split_cat

from optimus.pipeline import PRESETS, patterns_by_name, select
from optimus.upstream import NO_COUNTERPART, PRESETS_UPSTREAM, TRANSLATIONS, upstream_names


def registered() -> set[str]:
    """Keys that the installed torch takes in its two fusion options."""
    registries: Iterable[Iterable[str]] = (
        split_cat.PRE_GRAD_PATTERNS,
        split_cat.POST_GRAD_PATTERNS,
        group_batch_fusion.PRE_GRAD_FUSIONS,
        group_batch_fusion.POST_GRAD_FUSIONS,
    )
    return {name for registry in registries for name in registry}


def test_every_name_of_the_installed_torch_is_known() -> None:
    assert len(registered()) > 30
    assert registered() <= TRANSLATIONS.keys() | NO_COUNTERPART.keys()


def test_translations_lead_to_patterns() -> None:
    meant = {name for names in TRANSLATIONS.values() for name in names}
    assert meant <= patterns_by_name().keys()
    assert set(PRESETS_UPSTREAM.values()) <= set(PRESETS)
    assert not TRANSLATIONS.keys() & NO_COUNTERPART.keys()
    assert not TRANSLATIONS.keys() & patterns_by_name().keys()


def test_upstream_options_select_the_same_as_our_words() -> None:
    options = {"batch_linear": {}, "split_cat_pass": {}, "unbind_stack_pass": {}}
    ours = ["batch_linears", *TRANSLATIONS["split_cat_pass"], "cancel_unbind_stack"]
    assert select(list(options)).names == select(ours).names
    assert select("vertical_opt").names == select("vertical").names
    assert select(["horizontal_opt", "all"]).names == select("all").names
    assert "batch_linears" not in select("all", disable=["batch_linear"]).names


def test_a_name_without_counterpart_says_why() -> None:
    with pytest.raises(ValueError, match="no counterpart here: one draw"):
        select(["batch_linear", "batch_dropout"])
    with pytest.raises(ValueError, match="nearest valid: batch_layernorm"):
        select("batch_layernormm")


def test_names_from_our_side() -> None:
    assert set(upstream_names("batch_linears")) >= {"batch_linear", "group_linear"}
    assert upstream_names("merge_duplicates") == ()
