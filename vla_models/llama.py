"""LLaMA decoder: RMSNorm, rotary positions, SwiGLU and grouped-query attention, with a key/value cache.

The robot's backbone is a small configuration of it without a language-model head; a LLaMA checkpoint from a
Hugging Face folder fills a larger one (:mod:`vla_models.loaders.huggingface`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_models.attention import ATTENTION_IMPLEMENTATIONS, attention, causal_mask
from vla_models.rope import RopeScaling, apply_rotary, inverse_frequencies, rotary_angles, rotary_scale

INIT_STD = 0.02

LayerKv = tuple[Tensor, Tensor]
"""Keys (already rotated) and values of one layer, f[B, Hkv, P, head_dim] each."""


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a LLaMA. ``head_dim`` defaults to hidden_size / num_heads; ``lm_head`` False leaves out the logits."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    lm_head: bool = True
    tie_word_embeddings: bool = False
    attention: str = "math"

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):  # JSON gives an object
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.attention not in ATTENTION_IMPLEMENTATIONS:
            raise ValueError(f"attention {self.attention!r}; known: {', '.join(ATTENTION_IMPLEMENTATIONS)}")


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """f[..., size] -> the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LlamaAttention(nn.Module):
    """Causal grouped-query attention over the cache and the new tokens, f[B, T, hidden] -> f[B, T, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.implementation = config.attention
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, past: LayerKv | None
    ) -> tuple[Tensor, LayerKv]:
        """``angles`` of the new tokens, ``mask`` bool[T, P + T]; gives the output and the cache of P + T positions."""
        batch, tokens, _ = x.shape
        heads = self.qkv_proj(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        # One rotation for queries and keys together: fewer, larger operations.
        rotated, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = apply_rotary(rotated, *angles).split([self.num_heads, self.num_kv_heads], dim=1)
        if past is not None:
            k = torch.cat([past[0].to(k.dtype), k], dim=2)
            v = torch.cat([past[1].to(v.dtype), v], dim=2)
        attended = attention(q, k, v, mask=mask, implementation=self.implementation)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, tokens, -1)), (k, v)


class LlamaMlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """f[B, T, hidden] -> f[B, T, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class LlamaLayer(nn.Module):
    """x + Attention(RmsNorm(x)), then x + MLP(RmsNorm(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = LlamaAttention(config)
        self.post_attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMlp(config)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, past: LayerKv | None
    ) -> tuple[Tensor, LayerKv]:
        """As :meth:`LlamaAttention.forward`."""
        attended, kv = self.attention(self.input_norm(x), angles, mask, past)
        x = x + attended
        return x + self.mlp(self.post_attention_norm(x)), kv


class Llama(nn.Module):
    """Decoder-only language model that also takes embeddings, so that image tokens and queries can be mixed in."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        has_own_head = config.lm_head and not tied
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if has_own_head else None
        # Not a buffer: `.to(bfloat16)` must not round the frequencies.
        self.inverse_frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.rotary_scale = rotary_scale(config.rope_scaling)
        self.apply(_init_weights)

    def stretch_context(self, tokens: int) -> None:
        """Lets the model run up to so many tokens by YaRN, from the length it was trained for.

        Raises ValueError if its rotary positions are stretched already.
        """
        config = self.config
        if config.rope_scaling is not None:
            raise ValueError(f"the rotary positions are stretched already, by {config.rope_scaling.kind}")
        trained = config.max_position_embeddings
        scaling = RopeScaling("yarn", tokens / trained, original_max_position_embeddings=trained)
        self.config = replace(config, rope_scaling=scaling, max_position_embeddings=tokens)
        self.inverse_frequencies = inverse_frequencies(config.head_dim, config.rope_theta, scaling)
        self.rotary_scale = rotary_scale(scaling)

    def embed(self, ids: Tensor) -> Tensor:
        """i64[B, T] -> f32[B, T, hidden]."""
        return self.embed_tokens(ids)

    def forward(
        self,
        inputs_embeds: Tensor,
        past_kv: Sequence[LayerKv] | None = None,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerKv]]:
        """Runs T new tokens after P cached ones.

        ``inputs_embeds`` f[B, T, hidden]; ``past_kv`` one (k, v) per layer, f[B, Hkv, P, head_dim], left unchanged;
        ``positions`` i64[T] or i64[B, T], default P .. P+T-1. Token i sees the cache and new tokens 0..i, but for those
        where ``visible`` bool[B, P + T] is False (padding); every token must see at least one.
        Gives the hidden states f[B, T, hidden] after the final norm, and a new cache of P + T positions.
        """
        tokens, device = inputs_embeds.shape[1], inputs_embeds.device
        cached = 0 if past_kv is None else past_kv[0][0].shape[2]
        if positions is None:
            positions = torch.arange(cached, cached + tokens, device=device)
        angles = rotary_angles(positions, self.inverse_frequencies.to(device), self.rotary_scale)
        mask = causal_mask(tokens, cached + tokens, device) if tokens > 1 else None
        if visible is not None:
            seen = visible[:, None, None, :]
            mask = seen if mask is None else mask & seen
        x = inputs_embeds
        new_kv: list[LayerKv] = []
        for index, layer in enumerate(self.layers):
            x, kv = layer(x, angles, mask, None if past_kv is None else past_kv[index])
            new_kv.append(kv)
        return self.norm(x), new_kv

    def logits(self, hidden: Tensor) -> Tensor:
        """f[B, T, hidden] of :meth:`forward` -> f[B, T, vocab_size]."""
        if not self.config.lm_head:
            raise ValueError("this LLaMA was configured without a language-model head (lm_head: false)")
        return F.linear(hidden, self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
