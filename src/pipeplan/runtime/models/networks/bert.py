"""BERT's encoder (Devlin et al. 2018) with its pooler: norms after each half layer, learned positions, GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BertAttention(nn.Module):
    """Attention over all words, added to its input and normed."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.output, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, words, hidden] to the same."""
        query, key, value = (self._by_head(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        result: Tensor = self.norm(x + self.output(mixed))
        return result

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, x.shape[2] // self.heads).transpose(1, 2)


class BertFeedForward(nn.Module):
    """Two linear layers with a GELU between, added to their input and normed."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.expand, self.output = nn.Linear(hidden, wide), nn.Linear(wide, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, words, hidden] to the same."""
        result: Tensor = self.norm(x + self.output(F.gelu(self.expand(x))))
        return result


class BertLayer(nn.Module):
    """Attention, then the feed-forward half."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention, self.ffn = BertAttention(hidden, heads), BertFeedForward(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, words, hidden] to the same."""
        result: Tensor = self.ffn(self.attention(x))
        return result


class BertEmbeddings(nn.Module):
    """Words, places and the first of two segments, added up and normed."""

    def __init__(self, vocabulary: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.segments = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, words] to [samples, words, hidden]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        found = self.words(tokens) + self.positions(places) + self.segments(torch.zeros_like(tokens))
        result: Tensor = self.norm(found)
        return result


class Bert(nn.Module):
    """The encoder and what it makes of the first word."""

    def __init__(
        self, layers: int = 12, hidden: int = 768, heads: int = 12, vocabulary: int = 30_522, positions: int = 512
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embeddings = BertEmbeddings(vocabulary, positions, hidden)
        self.layers = nn.ModuleList(BertLayer(hidden, heads) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, words] to [samples, hidden]."""
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.pooler(x[:, 0]))
