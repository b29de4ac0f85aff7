"""The robot backbone: ViT + LLaMA with readout queries → fixed-size context tokens (stages 4 and 7).

Sequence order ``[text | image tokens | readout queries]``, causal: the text prefix is the same at every tick of an
instruction, so its keys and values are computed once and reused; image tokens see the instruction, the readouts all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .llama import Llama, LlamaConfig
from .vit import Vit, VitConfig

PrefixKv = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class VlmConfig:
    """Shapes of the backbone; a larger configuration of the same code fills the same seams."""

    vit: VitConfig
    llama: LlamaConfig
    pixel_shuffle: int = 2  # s x s neighbouring patches become one language token
    num_readout: int = 16
    context_dim: int = 128
    text_length: int = 10
    pixel_mean: float = 0.5
    pixel_std: float = 0.5
    pad_id: int | None = None  # its tokens are masked; None: padding is a token like any other, always as many

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, kept in the manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VlmConfig:
        """Inverse of ``to_dict``; unknown keys raise TypeError."""
        values = dict(data)
        vit, llama = VitConfig(**values.pop("vit")), LlamaConfig(**values.pop("llama"))
        return cls(vit=vit, llama=llama, **values)


class Vlm(nn.Module):
    """ViT → pixel shuffle → LLaMA over text, image tokens and readout queries → projected context."""

    def __init__(self, config: VlmConfig) -> None:
        super().__init__()
        self.config = config
        self.vit = Vit(config.vit)
        self.llama = Llama(config.llama)
        d_vit, d = config.vit.hidden_size, config.llama.hidden_size
        self.connector = nn.Linear(d_vit * config.pixel_shuffle**2, d)
        self.readout = nn.Parameter(torch.randn(config.num_readout, d) * 0.02)
        self.projector = nn.Linear(d, config.context_dim)

    def patches(self, images: Tensor) -> Tensor:
        """``images`` u8[B, H, W, 3] → ViT features f[B, N, d_vit]."""
        pixels = images.permute(0, 3, 1, 2).float().div(255.0)
        return self.vit((pixels - self.config.pixel_mean) / self.config.pixel_std)

    def image_tokens(self, patches: Tensor) -> Tensor:
        """ViT features [B, N, d_vit] → language tokens [B, N / s², d] (row-major blocks of s x s patches)."""
        b, n, d = patches.shape
        s, side = self.config.pixel_shuffle, int(round(n**0.5))
        grid = patches.view(b, side // s, s, side // s, s, d).permute(0, 1, 3, 2, 4, 5)
        return self.connector(grid.reshape(b, (side // s) ** 2, s * s * d))

    def encode_text(self, ids: Tensor) -> PrefixKv:
        """``ids`` i64[B, T] → keys and values of the prefix, one pair a layer, each [B, H_kv, T, d_h]."""
        return self.llama(self.llama.embed(ids))[1]

    def text_lengths(self, ids: Tensor) -> Tensor | None:
        """``ids`` i64[B, T] → tokens before the padding i64[B]; None if this backbone does not mask padding."""
        return None if self.config.pad_id is None else (ids != self.config.pad_id).sum(dim=1)

    def readout_context(self, prefix: PrefixKv, image_tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Prefix K/V and image tokens [B, M, d] → context tokens [B, K, D]; ``lengths`` from :meth:`text_lengths`."""
        b = image_tokens.shape[0]
        tail = torch.cat([image_tokens, self.readout.to(image_tokens.dtype).expand(b, -1, -1)], dim=1)
        positions, visible = self._after_text(lengths, prefix[0][0].shape[2], tail.shape[1])
        hidden, _ = self.llama(tail, past_kv=prefix, positions=positions, visible=visible)
        return self.projector(hidden[:, -self.config.num_readout :])

    def _after_text(self, lengths: Tensor | None, text: int, tail: int) -> tuple[Tensor | None, Tensor | None]:
        """Positions i64[B, tail] of what follows the text, and who is visible bool[B, text + tail]: as if there were no
        padding."""
        if (lengths is None) != (self.config.pad_id is None):
            raise ValueError("a backbone with pad_id needs the lengths of its texts, one without takes none")
        if lengths is None:
            return None, None
        where = torch.arange(text + tail, device=lengths.device)
        visible = (where < lengths[:, None]) | (where >= text)
        return lengths[:, None] + where[:tail], visible

    def context(self, prefix: PrefixKv, images: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Prefix K/V of B instructions and ``images`` u8[B, H, W, 3] → context f32[B, K, D]."""
        return self.readout_context(prefix, self.image_tokens(self.patches(images)), lengths).float()

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        """One-shot form of ``encode_text`` + ``context``: ids i64[B, T], images u8[B, H, W, 3] → f32[B, K, D]."""
        tokens = self.image_tokens(self.patches(images))
        readout = self.readout.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
        lengths, text = self.text_lengths(ids), ids.shape[1]
        positions, visible = self._after_text(lengths, text, tokens.shape[1] + readout.shape[1])
        if positions is not None:
            own = torch.arange(text, device=ids.device).expand(len(ids), -1)
            positions = torch.cat([own, positions], dim=1)
        embedded = torch.cat([self.llama.embed(ids).to(tokens.dtype), tokens, readout], dim=1)
        hidden, _ = self.llama(embedded, positions=positions, visible=visible)
        return self.projector(hidden[:, -self.config.num_readout :]).float()
