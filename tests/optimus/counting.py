"""What Inductor would be given: GEMMs, copies and saved activations of a graph, not compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten
GEMMS: set[Any] = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
GROUPED = {"kernels::grouped_linear": 1, "kernels::grouped_linear_backward": 2}
"""Launches of the operators that multiply many matrices of unequal shapes."""
COPIES: set[Any] = {aten.cat.default, aten.clone.default}


@dataclass
class Counts:
    """Forward and backward of one graph. `copied_bytes`: written forward by joins and copies of
    anything but parameters; `saved_bytes`: kept for backward besides inputs."""

    forward_gemms: int = 0
    backward_gemms: int = 0
    copied_bytes: int = 0
    saved_bytes: int = 0

    @property
    def gemms(self) -> tuple[int, int]:
        """Forward and backward."""
        return self.forward_gemms, self.backward_gemms


def count(module: GraphModule, inputs: Sequence[Any]) -> Counts:
    """Counts of a Torch-IR graph, by Inductor's decompositions and partition of it."""
    counts = Counts()
    num_outputs = len(pytree.tree_leaves(module.graph.output_node().args))
    parameters = [isinstance(x, torch.nn.Parameter) for x in inputs]

    def forward(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        stored = {n for n, is_one in zip(placeholders, parameters, strict=False) if is_one}
        counts.forward_gemms += _num_gemms(graph)
        for node in graph.graph.nodes:
            if node.target in COPIES and not _roots(node, _VIEWS | COPIES) <= stored:
                counts.copied_bytes += node.meta["val"].nbytes
        saved = pytree.tree_leaves(graph.graph.output_node().args)[num_outputs:]
        kept = {root for n in saved if isinstance(n, Node) for root in _roots(n, _VIEWS)}
        kept = {n for n in kept if not _roots(n, _VIEWS | COPIES) <= {*placeholders}}
        counts.saved_bytes += sum(n.meta["val"].nbytes for n in kept)
        return graph.forward

    def backward(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        counts.backward_gemms += _num_gemms(graph)
        return graph.forward

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    with functorch.patch(force_non_lazy_backward_lowering=True):
        compiler(module, list(inputs))
    return counts


def _num_gemms(module: GraphModule) -> int:
    targets = [node.target for node in module.graph.nodes]
    grouped = sum(GROUPED.get(t._schema.name, 0) for t in targets if hasattr(t, "_schema"))
    return sum(target in GEMMS for target in targets) + grouped


_VIEWS: set[Any] = {
    getattr(aten, name).default
    for name in ("view", "permute", "unsqueeze", "squeeze", "t", "expand", "alias", "detach")
} | {
    operator.getitem,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.transpose.int,
    aten.unbind.int,
}


def _roots(node: Node, through: set[Any]) -> set[Node]:
    """What `node` is made from by the operators of `through`."""
    if node.target not in through or _is_result_of_many(node, through):
        return {node}
    return {root for source in node.all_input_nodes for root in _roots(source, through)}


def _is_result_of_many(node: Node, through: set[Any]) -> bool:
    """Whether this is one of several results, none of which is made from `through` alone."""
    return node.target is operator.getitem and node.all_input_nodes[0].target not in through
