"""RankMixer (Zhu et al., https://arxiv.org/abs/2507.15551)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch
from recsys.models.layers import Fields, check_sizes


class RankMixer(RecModel):
    """All features cut into tokens; layers of token mixing and a feed-forward net for each token.

    64 features of 64, 16 tokens of 256, 2 layers and ffn_ratio 2 are the small model;
    39 fields of 16, 16 tokens of 768, 2 layers and ffn_ratio 4 the one of about 100 M parameters.
    `token_dim` must be a multiple of `num_tokens`, as there are as many heads as tokens.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 16,
        num_tokens: int = 16,
        token_dim: int = 256,
        num_layers: int = 2,
        ffn_ratio: int = 2,
    ) -> None:
        check_sizes(
            {
                "num_tokens": num_tokens,
                "token_dim": token_dim,
                "num_layers": num_layers,
                "ffn_ratio": ffn_ratio,
            }
        )
        width = (schema.num_dense + schema.num_sparse) * embedding_dim
        if num_tokens > width > 0:
            raise ValueError(f"num_tokens is {num_tokens}, there are only {width} numbers to cut")
        if token_dim % num_tokens:
            raise ValueError(
                f"token_dim is {token_dim}, must be a multiple of num_tokens, which is {num_tokens}"
            )
        super().__init__(
            SparseArch(schema, embedding_dim),
            RankMixerDenseArch(
                schema,
                embedding_dim=embedding_dim,
                num_tokens=num_tokens,
                token_dim=token_dim,
                num_layers=num_layers,
                ffn_ratio=ffn_ratio,
            ),
        )


class RankMixerDenseArch(nn.Module):
    """Everything of `RankMixer` after the embedding tables."""

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int,
        num_tokens: int,
        token_dim: int,
        num_layers: int,
        ffn_ratio: int,
    ) -> None:
        super().__init__()
        self.fields = Fields(schema, embedding_dim)
        self.token_sizes = _sizes(self.fields.num_fields * embedding_dim, num_tokens)
        self.projections = nn.ModuleList([nn.Linear(n, token_dim) for n in self.token_sizes])
        self.blocks = nn.ModuleList(
            [RankMixerBlock(num_tokens, token_dim, ffn_ratio) for _ in range(num_layers)]
        )
        self.norm = nn.LayerNorm(token_dim)
        self.head = nn.Linear(token_dim, schema.num_tasks)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        flat = self.fields(dense, embedded).flatten(1)
        pieces = torch.split(flat, self.token_sizes, dim=1)
        projected = [f(piece) for f, piece in zip(self.projections, pieces, strict=True)]
        x = torch.stack(projected, dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))


class RankMixerBlock(nn.Module):
    """Equation 1: LayerNorm(mix(x) + x), then LayerNorm(ffn(s) + s), each token its own ffn."""

    def __init__(self, num_tokens: int, token_dim: int, ffn_ratio: int) -> None:
        super().__init__()
        hidden = token_dim * ffn_ratio
        self.mix_norm = nn.LayerNorm(token_dim)
        self.ffns = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(token_dim, hidden), nn.GELU(), nn.Linear(hidden, token_dim))
                for _ in range(num_tokens)
            ]
        )
        self.ffn_norm = nn.LayerNorm(token_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_tokens, token_dim) to the same."""
        s = self.mix_norm(mix_tokens(x) + x)
        tokens = [ffn(s[:, i]) for i, ffn in enumerate(self.ffns)]
        return self.ffn_norm(torch.stack(tokens, dim=1) + s)


def mix_tokens(x: Tensor) -> Tensor:
    """Equations 2 and 3: token h of the result is head h of all tokens, side by side."""
    num_tokens = x.shape[1]
    heads = [torch.chunk(token, num_tokens, dim=-1) for token in torch.unbind(x, dim=1)]
    mixed = [torch.cat([token[h] for token in heads], dim=-1) for h in range(num_tokens)]
    return torch.stack(mixed, dim=1)


def _sizes(width: int, num_pieces: int) -> list[int]:
    """`width` cut into pieces that differ by one at most."""
    size, longer = divmod(width, num_pieces)
    return [size + (i < longer) for i in range(num_pieces)]
