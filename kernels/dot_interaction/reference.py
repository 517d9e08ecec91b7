"""DLRM's interaction in plain PyTorch: the definition, and what runs where no kernel can."""

from __future__ import annotations

import torch
from torch import Tensor


def triangle(num_vectors: int, upper: bool, device: torch.device) -> Tensor:
    """Row and column (2, P) of each pair of vectors, in the order of the result."""
    if upper:
        return torch.triu_indices(num_vectors, num_vectors, 1, device=device)
    return torch.tril_indices(num_vectors, num_vectors, -1, device=device)


def dot_interaction(dense: Tensor, embedded: Tensor, upper: bool) -> Tensor:
    """(B, D + P): `dense` and the products of all P pairs of vectors."""
    vectors = torch.cat((dense.unsqueeze(1).to(embedded.dtype), embedded), 1)
    products = torch.bmm(vectors, vectors.mT)
    rows, columns = triangle(vectors.shape[1], upper, dense.device)
    dtype = torch.promote_types(dense.dtype, embedded.dtype)
    return torch.cat((dense.to(dtype), products[:, rows, columns].to(dtype)), 1)


def backward(grad: Tensor, dense: Tensor, embedded: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `dense` and `embedded`: S @ vectors, S the symmetric matrix of the pairs'."""
    vectors = torch.cat((dense.unsqueeze(1).to(embedded.dtype), embedded), 1)
    num_vectors, size = vectors.shape[1:]
    rows, columns = triangle(num_vectors, upper, dense.device)
    pairs = grad[:, size:].to(embedded.dtype)
    symmetric = pairs.new_zeros(len(pairs), num_vectors, num_vectors)
    symmetric[:, rows, columns] = pairs
    symmetric[:, columns, rows] = pairs
    grads = torch.bmm(symmetric, vectors)
    return (grad[:, :size] + grads[:, 0]).to(dense.dtype), grads[:, 1:].contiguous()
