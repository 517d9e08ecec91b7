"""DLRM's interaction in plain PyTorch: the definition, and what runs where no kernel can."""

from __future__ import annotations

import torch
from torch import Tensor


def triangle(num_vectors: int, upper: bool, device: torch.device) -> Tensor:
    """Row and column (2, P) of each pair of vectors, in the order of the result."""
    if upper:
        return torch.triu_indices(num_vectors, num_vectors, 1, device=device)
    return torch.tril_indices(num_vectors, num_vectors, -1, device=device)


def dot_interaction(dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, D + P): `dense` and the products of the pairs (rows[p], columns[p]) of vectors."""
    vectors = _vectors(dense, embedded)
    products = torch.bmm(vectors, vectors.mT)
    dtype = torch.promote_types(dense.dtype, embedded.dtype)
    return torch.cat((dense.to(dtype), products[:, rows, columns].to(dtype)), 1)


def backward(
    grad: Tensor, dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `dense` and `embedded`: (G + G.T) @ vectors, G the gradients of the products."""
    vectors = _vectors(dense, embedded)
    num_vectors, size = vectors.shape[1:]
    pairs = grad.new_zeros(len(grad), num_vectors, num_vectors, dtype=embedded.dtype)
    every = torch.arange(len(grad), device=grad.device).unsqueeze(1)
    of_pairs = grad[:, size:].to(embedded.dtype)
    pairs.index_put_((every, rows, columns), of_pairs, accumulate=True)
    grads = torch.bmm(pairs + pairs.mT, vectors)
    return (grad[:, :size] + grads[:, 0]).to(dense.dtype), grads[:, 1:].contiguous()


def _vectors(dense: Tensor, embedded: Tensor) -> Tensor:
    return torch.cat((dense.unsqueeze(1).to(embedded.dtype), embedded), 1)
