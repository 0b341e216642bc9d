"""A small transformer that predicts the next byte, and a text that comes with Python."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

BYTES = 256


def text(device: torch.device) -> torch.Tensor:
    """Python's help on its own language, some 700 KB."""
    found = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).long().to(device)


def batches(data: torch.Tensor, count: int, batch: int, length: int) -> list[torch.Tensor]:
    """Random pieces of the text, always the same ones: shape (batch, length + 1) each."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - length, (count, batch), generator=generator)
    return [torch.stack([data[s : s + length + 1] for s in part.tolist()]) for part in starts]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as the input."""
        y = functional.rms_norm(x, x.shape[-1:])
        parts = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.relu(self.up(functional.rms_norm(x, x.shape[-1:]))).square())


class Transformer(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores, shape (batch, length, 256), of tokens, shape (batch, length)."""
        x = self.embedding(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(functional.rms_norm(x, x.shape[-1:]))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the next byte."""
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def matrices(self) -> list[nn.Parameter]:
        """The weights inside the blocks: what Muon and SOAP are for."""
        return [p for p in self.blocks.parameters() if p.ndim == 2]
