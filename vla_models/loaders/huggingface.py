"""Loads a Hugging Face model folder (config.json and safetensors) into :class:`Llama` or :class:`Vit`.

Known layouts: LLaMA, the SigLIP vision tower and the CLIP vision tower, the towers alone or inside a whole
SigLIP/CLIP checkpoint. Loading is strict, see :mod:`vla_models.loaders.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vla_models.llama import Llama, LlamaConfig
from vla_models.loaders.checkpoint import (
    Checkpoint,
    NotACheckpoint,
    Part,
    UnexpectedTensors,
    UnsupportedArchitecture,
    UnsupportedConfig,
    read_json,
)
from vla_models.rope import RopeScaling
from vla_models.vit import Vit, VitConfig

LLAMA_ARCHITECTURES = ("LlamaForCausalLM", "LlamaModel")
SIGLIP_ARCHITECTURES = ("SiglipVisionModel", "SiglipModel")
CLIP_ARCHITECTURES = ("CLIPVisionModel", "CLIPVisionModelWithProjection", "CLIPModel")
SUPPORTED_ARCHITECTURES = LLAMA_ARCHITECTURES + SIGLIP_ARCHITECTURES + CLIP_ARCHITECTURES


@dataclass(frozen=True)
class _VisionFamily:
    """What distinguishes the towers, and the values their configuration classes use for an absent key."""

    class_token: bool
    patch_bias: bool
    pre_layernorm: bool
    post_layernorm: bool
    activation: str
    layer_norm_eps: float
    patch_size: int
    outside: tuple[str, ...]  # tensors of the tower that do not act on its last hidden state


SIGLIP = _VisionFamily(False, True, False, True, "gelu_pytorch_tanh", 1e-6, 16, ("head.",))
# CLIP normalises only the pooled class token; its last hidden state is the plain output of the last block.
CLIP = _VisionFamily(True, False, True, False, "quick_gelu", 1e-5, 32, ("post_layernorm.",))

# Whole checkpoints hold tensors beside the tower; they are known by name, so that a foreign one still fails.
_BESIDE_TOWER = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"}


def load_huggingface(
    folder: str | Path, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> Llama | Vit:
    """The model in ``folder``, in evaluation mode, its weights converted to ``dtype``.

    Raises a subclass of CheckpointError that names the file, option or tensors at fault.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    architecture = _architecture(folder, config)
    if "quantization_config" in config:
        raise UnsupportedConfig(f"{folder}: quantised checkpoints are not supported; save it de-quantised")
    checkpoint = Checkpoint(folder)
    if architecture in LLAMA_ARCHITECTURES:
        return _load_llama(checkpoint, config, architecture == "LlamaForCausalLM", attention, dtype)
    family = SIGLIP if architecture in SIGLIP_ARCHITECTURES else CLIP
    return _load_vit(checkpoint, config.get("vision_config", config), family, attention, dtype)


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise NotACheckpoint(f"{folder / 'config.json'}: no architectures")
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UnsupportedArchitecture(f"{folder}: architecture {architectures[0]!r}; supported: {supported}")
    return str(architectures[0])


# --- LLaMA -----------------------------------------------------------------------------------------------------------


def llama_config(config: Mapping[str, Any], *, lm_head: bool, attention: str = "sdpa") -> LlamaConfig:
    """The LlamaConfig that a config.json of transformers 4 or 5 describes."""
    for option in ("attention_bias", "mlp_bias"):
        if config.get(option):
            raise UnsupportedConfig(f"{option}: true is not supported; LLaMA's projections have no bias")
    _only(config, "hidden_act", "silu", ("silu", "swish"))
    num_heads = _integer(config, "num_attention_heads")
    theta, scaling = _rope(config)
    return LlamaConfig(
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=_integer(config, "hidden_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
        intermediate_size=_integer(config, "intermediate_size"),
        head_dim=config.get("head_dim"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_integer(config, "max_position_embeddings", 2048),
        lm_head=lm_head,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention=attention,
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    # transformers 5 keeps everything in rope_parameters; 4 had rope_theta beside an optional rope_scaling.
    options = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(options.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = options.get("rope_type", options.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in _ROPE_FIELDS:
        raise UnsupportedConfig(f"rope type {kind!r}; supported: default, {', '.join(_ROPE_FIELDS)}")
    needed, optional = _ROPE_FIELDS[kind]
    absent = [field for field in needed if options.get(field) is None]
    if absent:
        raise UnsupportedConfig(f"rope type {kind!r} without {', '.join(absent)}")
    if kind == "yarn" and (options.get("mscale") or options.get("mscale_all_dim")):
        raise UnsupportedConfig("rope type 'yarn' with mscale is not supported; give attention_factor instead")
    given = [field for field in needed + optional if options.get(field) is not None]
    return theta, RopeScaling(kind, **{field: options[field] for field in given})


_ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    ),
}
"""Rope type -> the options it must have, and those it may have."""


def _load_llama(
    checkpoint: Checkpoint, raw: Mapping[str, Any], lm_head: bool, attention: str, dtype: torch.dtype
) -> Llama:
    config = llama_config(raw, lm_head=lm_head, attention=attention)
    with torch.device("meta"):
        model = Llama(config)
    prefix = "model." if "model.embed_tokens.weight" in checkpoint.names else ""
    plan = _llama_plan(config, prefix)
    # Old checkpoints stored the rotary frequencies, which follow from the configuration.
    ignored = [f"{prefix}layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)]
    if config.tie_word_embeddings and "lm_head.weight" in checkpoint.names:
        if not torch.equal(checkpoint.read("lm_head.weight"), checkpoint.read(f"{prefix}embed_tokens.weight")):
            raise UnexpectedTensors("lm_head.weight differs from the embedding although tie_word_embeddings is true")
        ignored.append("lm_head.weight")
    checkpoint.fill(model, plan, ignored, dtype)
    return model.eval()


def _llama_plan(config: LlamaConfig, prefix: str) -> dict[str, list[Part]]:
    d, ff, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    assert head_dim is not None
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    plan = {
        "embed_tokens.weight": [Part(f"{prefix}embed_tokens.weight", (config.vocab_size, d))],
        "norm.weight": [Part(f"{prefix}norm.weight", (d,))],
    }
    if config.lm_head and not config.tie_word_embeddings:
        plan["lm_head.weight"] = [Part("lm_head.weight", (config.vocab_size, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"{prefix}layers.{i}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        plan[ours + "input_norm.weight"] = [Part(theirs + "input_layernorm.weight", (d,))]
        plan[ours + "post_attention_norm.weight"] = [Part(theirs + "post_attention_layernorm.weight", (d,))]
        plan[ours + "attention.qkv_proj.weight"] = [
            Part(attn + f"{name}_proj.weight", (rows, d)) for name, rows in (("q", q), ("k", kv), ("v", kv))
        ]
        plan[ours + "attention.o_proj.weight"] = [Part(attn + "o_proj.weight", (d, q))]
        plan[ours + "mlp.gate_up_proj.weight"] = [Part(mlp + f"{name}_proj.weight", (ff, d)) for name in ("gate", "up")]
        plan[ours + "mlp.down_proj.weight"] = [Part(mlp + "down_proj.weight", (d, ff))]
    return plan


# --- SigLIP and CLIP vision towers -----------------------------------------------------------------------------------


def vit_config(config: Mapping[str, Any], family: _VisionFamily, *, attention: str = "sdpa") -> VitConfig:
    """The VitConfig of a vision config.json; published ones leave out the values their class defaults to."""
    _only(config, "num_channels", 3, (3,))
    activation = config.get("hidden_act", family.activation)
    _only(config, "hidden_act", family.activation, tuple(_ACTIVATIONS))
    return VitConfig(
        image_size=_integer(config, "image_size", 224),
        patch_size=_integer(config, "patch_size", family.patch_size),
        hidden_size=_integer(config, "hidden_size", 768),
        num_layers=_integer(config, "num_hidden_layers", 12),
        num_heads=_integer(config, "num_attention_heads", 12),
        intermediate_size=_integer(config, "intermediate_size", 3072),
        activation=_ACTIVATIONS[activation],
        layer_norm_eps=float(config.get("layer_norm_eps", family.layer_norm_eps)),
        class_token=family.class_token,
        patch_bias=family.patch_bias,
        pre_layernorm=family.pre_layernorm,
        post_layernorm=family.post_layernorm,
        attention=attention,
    )


def _load_vit(
    checkpoint: Checkpoint, raw: Mapping[str, Any], family: _VisionFamily, attention: str, dtype: torch.dtype
) -> Vit:
    config = vit_config(raw, family, attention=attention)
    with torch.device("meta"):
        model = Vit(config)
    prefix = "vision_model." if any(name.startswith("vision_model.") for name in checkpoint.names) else ""
    ignored = [prefix + name for name in family.outside + ("embeddings.position_ids",)]
    checkpoint.fill(model, _vit_plan(config, prefix), [*ignored, *_BESIDE_TOWER], dtype)
    return model.eval()


def _vit_plan(config: VitConfig, prefix: str) -> dict[str, list[Part]]:
    d, ff, patch = config.hidden_size, config.intermediate_size, config.patch_size
    embeddings = prefix + "embeddings."
    plan = {
        "patch_embedding.convs.0.weight": [Part(embeddings + "patch_embedding.weight", (d, 3, patch, patch))],
        "position_embedding": [Part(embeddings + "position_embedding.weight", (config.num_tokens, d))],
    }
    if config.patch_bias:
        plan["patch_embedding.convs.0.bias"] = [Part(embeddings + "patch_embedding.bias", (d,))]
    if config.class_token:
        plan["class_embedding"] = [Part(embeddings + "class_embedding", (d,))]
    norms = {"pre_layernorm": (config.pre_layernorm, "pre_layrnorm")}  # CLIP's checkpoints spell it so
    norms["post_layernorm"] = (config.post_layernorm, "post_layernorm")
    for ours, (present, theirs) in norms.items():
        if present:
            plan.update({f"{ours}.{kind}": [Part(f"{prefix}{theirs}.{kind}", (d,))] for kind in ("weight", "bias")})
    for i in range(config.num_layers):
        plan.update(_vit_block_plan(f"blocks.{i}.", f"{prefix}encoder.layers.{i}.", d, ff))
    return plan


def _vit_block_plan(ours: str, theirs: str, d: int, ff: int) -> dict[str, list[Part]]:
    plan = {}
    for kind in ("weight", "bias"):
        columns = {"d": (d,), "ff": (ff,)} if kind == "weight" else {"d": (), "ff": ()}
        plan[f"{ours}norm1.{kind}"] = [Part(f"{theirs}layer_norm1.{kind}", (d,))]
        plan[f"{ours}norm2.{kind}"] = [Part(f"{theirs}layer_norm2.{kind}", (d,))]
        plan[f"{ours}qkv_proj.{kind}"] = [
            Part(f"{theirs}self_attn.{name}_proj.{kind}", (d, *columns["d"])) for name in ("q", "k", "v")
        ]
        plan[f"{ours}out_proj.{kind}"] = [Part(f"{theirs}self_attn.out_proj.{kind}", (d, *columns["d"]))]
        plan[f"{ours}fc1.{kind}"] = [Part(f"{theirs}mlp.fc1.{kind}", (ff, *columns["d"]))]
        plan[f"{ours}fc2.{kind}"] = [Part(f"{theirs}mlp.fc2.{kind}", (d, *columns["ff"]))]
    return plan


# --- config.json -----------------------------------------------------------------------------------------------------


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None and default is not None:
        value = default  # some writers store an explicit null
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise NotACheckpoint(f"config.json: {key} is {value!r}; expected a positive integer")
    return value


def _only(config: Mapping[str, Any], key: str, default: object, supported: tuple[object, ...]) -> None:
    value = config.get(key, default)
    if value not in supported:
        raise UnsupportedConfig(f"{key} {value!r}; supported: {', '.join(map(str, supported))}")
