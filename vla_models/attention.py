"""Scaled dot-product attention, shared by the ViT and the LLaMA.

Two implementations with one meaning:

* ``math`` -- matmul, softmax, matmul. The faster one for the short sequences of the robot models (and under bf16
  autocast on a CPU), and it exports to plain ONNX operators.
* ``sdpa`` -- torch's fused kernel. Its memory does not grow with T x S, which large models need.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionImplementation = Literal["math", "sdpa"]
ATTENTION_IMPLEMENTATIONS: tuple[str, ...] = get_args(AttentionImplementation)


def causal_mask(num_queries: int, num_keys: int, device: torch.device | None = None) -> Tensor:
    """bool[T, S], True where a query may look. The queries are the *last* T of the S positions (the rest is cache)."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    implementation: str = "math",
) -> Tensor:
    """Attends with q f[B, H, T, d] over k, v f[B, Hkv, S, d]; gives f[B, H, T, d].

    H is a multiple of Hkv (grouped-query attention): query heads ``g*H/Hkv ...`` share key head g.
    ``mask`` is bool, broadcastable to [B, 1, T, S], True where a query may look. ``causal`` adds the mask of
    :func:`causal_mask`. Every query must be allowed at least one key.
    """
    if causal and q.shape[2] > 1:
        allowed = causal_mask(q.shape[2], k.shape[2], q.device)
        mask = allowed if mask is None else mask & allowed
    if implementation == "math":
        return _math(q, k, v, mask)
    if implementation == "sdpa":
        return _sdpa(q, k, v, mask)
    raise ValueError(f"attention implementation {implementation!r}; known: {', '.join(ATTENTION_IMPLEMENTATIONS)}")


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1], k.shape[2]
    # The query heads of a group are stacked along T, so that k and v are never repeated in memory.
    grouped = (q * head_dim**-0.5).reshape(batch, kv_heads, -1, head_dim)
    scores = grouped @ k.transpose(-2, -1)
    if mask is not None:
        # An additive bias in the dtype of the scores: its backward pass is free, and bf16 stays bf16 under autocast.
        bias = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device).masked_fill(~mask, float("-inf"))
        if heads == kv_heads:
            scores = scores + bias
        else:
            bias = bias.unsqueeze(2) if bias.dim() == 4 else bias  # [B, 1, 1, T, S]: one for all heads of a group
            scores = (scores.view(batch, kv_heads, heads // kv_heads, num_queries, num_keys) + bias).view_as(scores)
    return (torch.softmax(scores, dim=-1).to(v.dtype) @ v).view(batch, heads, num_queries, head_dim)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
