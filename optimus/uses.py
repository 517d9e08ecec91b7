"""How the value of a node is used: which parts are taken of it, and whether by nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from optimus.legality import tensor_of
from optimus.pieces import Piece, direct_piece, items_of, parting_of


def parts_taken(node: Node, dim: int) -> tuple[dict[Node, Piece], bool]:
    """What is taken of `node` along `dim`, and whether it is used in any other way, too."""
    taken: dict[Node, Piece] = {}
    others = False
    for user in node.users:
        parting, piece = parting_of(user), direct_piece(user)
        items = items_of(user) if parting is not None and parting.dim == dim else None
        if parting is not None and items is not None:
            for index, ends in items.items():
                taken |= dict.fromkeys(ends, parting.piece(index))
        elif piece is not None and piece.dim == dim:
            taken[user] = piece
        else:
            others = True
    wide = {user: piece for user, piece in taken.items() if piece.size}
    return wide, others or len(wide) < len(taken)


def used_once(nodes: Sequence[Node]) -> bool:
    """Whether no node has another user. A part that is used elsewhere, too, would get a second
    gradient as large as its source."""
    return all(len(node.users) == 1 for node in nodes)


def keeps_type(item: Node, cover: Sequence[Piece]) -> bool:
    """Whether joining just `cover` gives what joining all gave: their dtype and need of gradients
    are those of all parts together."""
    out, tensors = tensor_of(item), [tensor_of(piece.source) for piece in cover]
    known = [tensor for tensor in tensors if tensor is not None]
    if out is None or len(known) < len(tensors):
        return False
    grad = any(tensor.requires_grad for tensor in known)
    return grad == out.requires_grad and all(tensor.dtype == out.dtype for tensor in known)
