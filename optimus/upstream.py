"""Names of PyTorch's own passes, in the words of Optimus.

Who has used `torch._inductor.config.pre_grad_fusion_options` or `post_grad_fusion_options` may go
on writing their keys as `patterns` and `disable`, and the presets of PyTorch's benchmark, too. The
translation does at least what the name says: forward and backward, before autograd, on dynamic
batches.
"""

from __future__ import annotations

_NORMALISATIONS = ("canonicalize_calls", "lower_parts_to_split", "lower_joins_to_cat")
_POINTWISE = ("batch_pointwise",)

TRANSLATIONS: dict[str, tuple[str, ...]] = {
    # pre_grad_fusion_options: split and cat
    "normalization_pass": _NORMALISATIONS,
    "remove_split_with_size_one_pass": ("remove_single_parts",),
    "merge_getitem_cat_pass": ("cancel_split_cat",),
    "merge_stack_tahn_unbind_pass": ("merge_split_stack", "cancel_stack_unbind", *_POINTWISE),
    "merge_splits_pass": ("merge_nested_splits",),
    "mutate_cat_pass": ("cancel_split_cat", "cancel_cat_split"),
    "split_cat_pass": ("cancel_split_cat", "cancel_cat_split", "merge_nested_cats"),
    "unbind_stack_pass": ("cancel_unbind_stack",),
    "split_cat_to_slices_pass": ("cancel_split_cat",),
    "unbind_cat_to_view_pass": ("merge_unbind_cat",),
    "split_stack_to_cats_pass": ("merge_split_stack",),
    "unbind_stack_to_slices_pass": ("cancel_unbind_stack",),
    "move_reshape_out_of_split_stack_pass": ("move_reshape_out_of_stack",),
    "einsum_to_pointwise_pass": ("lower_einsum_to_gemm",),
    # pre_grad_fusion_options: batching
    "batch_linear": ("batch_linears",),
    "batch_linear_lhs": ("widen_shared_input_linears",),
    "batch_layernorm": ("batch_layer_norms",),
    "batch_tanh": _POINTWISE,
    "batch_sigmoid": _POINTWISE,
    "batch_relu": _POINTWISE,
    "batch_detach": _POINTWISE,
    "batch_nan_to_num": _POINTWISE,
    "batch_clamp": _POINTWISE,
    # post_grad_fusion_options
    "normalization_aten_pass": _NORMALISATIONS,
    "split_cat_aten_pass": ("cancel_split_cat", "cancel_cat_split"),
    "select_cat_aten_pass": ("merge_unbind_cat",),
    "unbind_stack_aten_pass": ("cancel_unbind_stack",),
    "move_view_after_cat_aten_pass": ("move_reshape_out_of_stack",),
    "decompose_mm_pass": ("sum_matrix_vector_products", "decompose_skinny_gemms"),
    "pad_aten_mm_pass": ("pad_gemms",),
    "shape_padding_multiplier": ("pad_gemms",),
    "activation_quantization_aten_pass": ("quantize_saved_activations",),
    "batch_linear_post_grad": ("batch_linears",),
    "group_linear": ("batch_linears", "group_linears"),
    "batch_aten_tanh": _POINTWISE,
    "batch_aten_sigmoid": _POINTWISE,
    "batch_aten_relu": _POINTWISE,
    "batch_aten_add": _POINTWISE,
    "batch_aten_sub": _POINTWISE,
    "batch_aten_mul": _POINTWISE,
    "batch_aten_div": _POINTWISE,
}
"""From a key of PyTorch's options to patterns of Optimus."""

PRESETS_UPSTREAM = {"vertical_opt": "vertical", "horizontal_opt": "horizontal"}
"""From a preset of PyTorch's benchmark to one of Optimus; `all` is called the same in both."""

NO_COUNTERPART = {
    "batch_dropout": "one draw for many branches gives other random numbers than eager does",
}
"""Why a key of PyTorch's options is not translated."""


def translated(word: str) -> tuple[str, ...] | None:
    """The patterns that `word` of PyTorch's options means; None for a word of another language.

    Raises ValueError saying why for a key that has no counterpart.
    """
    if word in NO_COUNTERPART:
        raise ValueError(f"PyTorch's {word!r} has no counterpart here: {NO_COUNTERPART[word]}")
    return TRANSLATIONS.get(word)


def upstream_names(pattern: str) -> tuple[str, ...]:
    """What PyTorch calls passes that do what `pattern` does; empty where it has none."""
    return tuple(name for name, patterns in TRANSLATIONS.items() if pattern in patterns)
