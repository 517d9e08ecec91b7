"""Dropouts, which eager mode runs as nothing at all where they drop nothing.

Then the result is the input itself: its memory, its strides, its gradients, under no_grad also. The
fake value does not say so, as compilers make it a copy.
"""

from __future__ import annotations

from torch.fx import Node

from optimus.legality import tensor_of
from optimus.ops import arguments, name_of
from optimus.values import is_positive

DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)


def kept_by_dropout(node: Node) -> Node | None:
    """The input, if the call is a dropout that is not known to drop something of it."""
    if name_of(node) not in DROPOUTS:
        return None
    values = arguments(node)
    if values is None or not isinstance(values["input"], Node):
        return node.all_input_nodes[0]
    value, p = tensor_of(values["input"]), values["p"]
    drops = values["training"] is True and type(p) in (int, float) and p != 0
    has_elements = value is not None and all(map(is_positive, value.shape))
    return None if drops and has_elements else values["input"]
