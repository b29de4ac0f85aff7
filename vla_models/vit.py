"""Vision transformer with pre-normalised blocks and learned position embeddings.

One configuration covers the robot's small encoder and the vision towers of SigLIP and CLIP
(:mod:`vla_models.loaders.huggingface` fills it from their checkpoints).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_models.attention import ATTENTION_IMPLEMENTATIONS, attention

INIT_STD = 0.02


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}


@dataclass(frozen=True)
class VitConfig:
    """Shape of a vision transformer. Images are square; ``image_size`` and ``patch_size`` are in pixels.

    ``stem`` replaces the single patch convolution by several non-overlapping ones, as (kernel = stride, channels)
    with a GELU between them; the kernels multiply to ``patch_size`` and the last has ``hidden_size`` channels.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str = "gelu"
    layer_norm_eps: float = 1e-6
    class_token: bool = False
    patch_bias: bool = True
    pre_layernorm: bool = False
    post_layernorm: bool = True
    stem: tuple[tuple[int, int], ...] | None = None
    attention: str = "math"

    def __post_init__(self) -> None:
        if self.stem is not None:  # JSON gives lists
            object.__setattr__(self, "stem", tuple((int(kernel), int(channels)) for kernel, channels in self.stem))
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}")
        if self.attention not in ATTENTION_IMPLEMENTATIONS:
            raise ValueError(f"attention {self.attention!r}; known: {', '.join(ATTENTION_IMPLEMENTATIONS)}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.image_size < self.patch_size:
            raise ValueError(f"image_size {self.image_size} is smaller than patch_size {self.patch_size}")
        self._check_stem()

    def _check_stem(self) -> None:
        if self.stem is None:
            return
        product = 1
        for kernel, _ in self.stem:
            product *= kernel
        if product != self.patch_size or self.stem[-1][1] != self.hidden_size:
            raise ValueError(
                f"stem {self.stem}: the kernels must multiply to patch_size {self.patch_size} "
                f"and the last stage must have hidden_size {self.hidden_size} channels"
            )

    @property
    def num_patches(self) -> int:
        """Image tokens per image, without the class token."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Length of the output sequence."""
        return self.num_patches + int(self.class_token)


class PatchEmbedding(nn.Module):
    """f32[B, 3, H, W] -> f[B, N, hidden], patches in row-major order."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        stages = config.stem or ((config.patch_size, config.hidden_size),)
        convs = []
        in_channels = 3
        for kernel, channels in stages:
            convs.append(nn.Conv2d(in_channels, channels, kernel, stride=kernel, bias=config.patch_bias))
            in_channels = channels
        self.convs = nn.ModuleList(convs)

    def forward(self, pixels: Tensor) -> Tensor:
        """f32[B, 3, image_size, image_size] -> f[B, N, hidden]."""
        x = self.convs[0](pixels)
        for conv in list(self.convs)[1:]:
            x = conv(F.gelu(x))
        return x.flatten(2).transpose(1, 2)


class VitBlock(nn.Module):
    """x + Attention(LayerNorm(x)), then x + MLP(LayerNorm(x)), on f[B, N, hidden]."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.num_heads = config.num_heads
        self.attention = config.attention
        self.activation = ACTIVATIONS[config.activation]
        self.norm1 = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.qkv_proj = nn.Linear(d, 3 * d)
        self.out_proj = nn.Linear(d, d)
        self.norm2 = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(d, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, d)

    def forward(self, x: Tensor) -> Tensor:
        """f[B, N, hidden] -> f[B, N, hidden]."""
        batch, tokens, d = x.shape
        qkv = self.qkv_proj(self.norm1(x)).view(batch, tokens, 3, self.num_heads, d // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = attention(q, k, v, implementation=self.attention).transpose(1, 2).reshape(batch, tokens, d)
        x = x + self.out_proj(attended)
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))


class Vit(nn.Module):
    """Image encoder: normalised pixels in, one hidden state per patch out."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.patch_embedding = PatchEmbedding(config)
        self.class_embedding = nn.Parameter(torch.zeros(d)) if config.class_token else None
        self.position_embedding = nn.Parameter(torch.zeros(config.num_tokens, d))
        self.pre_layernorm = nn.LayerNorm(d, eps=config.layer_norm_eps) if config.pre_layernorm else None
        self.blocks = nn.ModuleList(VitBlock(config) for _ in range(config.num_layers))
        self.post_layernorm = nn.LayerNorm(d, eps=config.layer_norm_eps) if config.post_layernorm else None
        self.apply(_init_weights)
        nn.init.trunc_normal_(self.position_embedding, std=INIT_STD)
        if self.class_embedding is not None:
            nn.init.trunc_normal_(self.class_embedding, std=INIT_STD)

    def forward(self, pixels: Tensor) -> Tensor:
        """f32[B, 3, image_size, image_size], normalised -> f32[B, num_tokens, hidden] (class token first, if any)."""
        expected = (3, self.config.image_size, self.config.image_size)
        if tuple(pixels.shape[1:]) != expected:
            raise ValueError(f"pixels {tuple(pixels.shape)}; expected [B, {', '.join(map(str, expected))}]")
        x = self.patch_embedding(pixels)
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)
        x = x + self.position_embedding
        if self.pre_layernorm is not None:
            x = self.pre_layernorm(x)
        for block in self.blocks:
            x = block(x)
        return x if self.post_layernorm is None else self.post_layernorm(x)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        # A std of 0.02 would all but silence a convolution over few inputs; scale it by the fan-in instead.
        fan_in = module.weight[0].numel()
        nn.init.trunc_normal_(module.weight, std=fan_in**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
