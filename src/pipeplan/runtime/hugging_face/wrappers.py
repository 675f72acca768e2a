"""Modules around transformers' models that take the tensors of a batch by name and return one summed loss.

Losses are sums over predictions, not means, so that gradients add up over micro-batches, and are accumulated in
float32 at least.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Captions", "Pairs", "Translation", "WordsModel"]


class WordsModel(nn.Module):
    """A language model, causal or masked, and the loss of the words it predicts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and targets [samples, sequence]; no loss where a target is -100."""
        return _summed_loss(self.model(input_ids=tokens, use_cache=False).logits, targets)


class Translation(nn.Module):
    """An encoder and a decoder, and the loss of the words that the decoder predicts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, decoder_tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens of the encoder [samples, sequence], of the decoder, and its targets."""
        made = self.model(input_ids=tokens, decoder_input_ids=decoder_tokens, use_cache=False)
        return _summed_loss(made.logits, targets)


class Pairs(nn.Module):
    """CLIP: two towers and the contrastive loss of the micro-batch, as a sum over its samples."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """Texts [samples, sequence] and their images [samples, channels, height, width]."""
        made = self.model(input_ids=tokens, pixel_values=pixels)
        scaled = made.text_embeds * self.model.logit_scale.exp()  # samples first, for as long as possible
        per_text = _wide(scaled @ made.image_embeds.t())
        partner = torch.arange(per_text.shape[0], device=per_text.device)
        by_text = F.cross_entropy(per_text, partner, reduction="sum")
        return (by_text + F.cross_entropy(per_text.t(), partner, reduction="sum")) / 2


class Captions(nn.Module):
    """Flava: text and image encoders, the multimodal encoder on both, and the loss of the words it predicts."""

    def __init__(self, model: nn.Module, head: Any) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.head.bias = self.head.decoder.bias  # transformers ties the two

    def forward(self, tokens: Tensor, pixels: Tensor, targets: Tensor) -> Tensor:
        """Texts [samples, sequence], images [samples, channels, height, width], targets as tokens or -100."""
        fused = self.model(input_ids=tokens, pixel_values=pixels).multimodal_embeddings
        return _summed_loss(self.head(fused[:, -tokens.shape[1] :]), targets)


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(_wide(logits).flatten(0, 1), targets.flatten(), reduction="sum")


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
