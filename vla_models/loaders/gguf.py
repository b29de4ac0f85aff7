"""Turns a GGUF file of a LLaMA into a Hugging Face folder: float32 safetensors, config, tokenizer, chat template.

De-quantised values are kept exactly, hence float32. Needs the gguf and tokenizers packages, but neither torch nor
transformers. Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_models.loaders.checkpoint import (
    SINGLE_FILE,
    CheckpointError,
    NotACheckpoint,
    UnexpectedTensors,
    UnsupportedArchitecture,
    UnsupportedConfig,
)
from vla_models.loaders.gguf_tokenizer import GgufTokenizer, write_tokenizer

Progress = Callable[[int, int], None]
"""Called with tensors done and tensors in all."""

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Writes the model in ``source`` into the existing, empty ``folder``.

    Raises a CheckpointError that names what is missing or not supported; ModuleNotFoundError without gguf, tokenizers.
    """
    import gguf
    from safetensors.numpy import save_file

    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError, KeyError) as error:
        raise NotACheckpoint(f"{source}: not a readable GGUF file: {error}") from error
    fields = {name: field for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(source, fields, tied="output.weight" not in tensors)
    if "rope_freqs.weight" in tensors:
        raise UnsupportedConfig(f"{source}: frequency factors (rope_freqs.weight); convert from a Hugging Face folder")
    state: dict[str, NDArray[np.float32]] = {}
    for done, (name, tensor) in enumerate(sorted(tensors.items())):
        if progress is not None:
            progress(done, len(tensors))
        state[_target(source, name)] = _weights(gguf, name, tensor, config)
    save_file(state, folder / SINGLE_FILE, metadata={"format": "pt"})
    tokenizer = GgufTokenizer.read(source, {name: field.contents for name, field in fields.items()})
    write_tokenizer(tokenizer, folder)
    _write_json(folder / "config.json", config | {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id})
    _write_json(folder / "generation_config.json", {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id})
    if progress is not None:
        progress(len(tensors), len(tensors))


def _config(source: Path, fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The config.json of these metadata."""

    def value(key: str, default: Any = None) -> Any:
        if key in fields:
            return fields[key].contents()
        if default is None:
            raise NotACheckpoint(f"{source}: no {key}")
        return default

    architecture = value("general.architecture")
    if architecture != "llama":
        raise UnsupportedArchitecture(f"{source}: architecture {architecture!r}; supported: llama")
    heads = value("llama.attention.head_count")
    hidden = value("llama.embedding_length")
    head_dim = value("llama.attention.key_length", hidden // heads)
    if value("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedConfig(f"{source}: rotary positions on part of a head are not supported")
    theta = value("llama.rope.freq_base", 10000.0)
    scaling = value("llama.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        rope = {"rope_type": "linear", "rope_theta": theta, "factor": value("llama.rope.scaling.factor")}
    elif scaling == "yarn":
        rope = {
            "rope_type": "yarn", "rope_theta": theta, "factor": value("llama.rope.scaling.factor"),
            "original_max_position_embeddings": value("llama.rope.scaling.original_context_length"),
        }  # fmt: skip
    elif scaling != "none":
        raise UnsupportedConfig(f"{source}: rope scaling {scaling!r}; supported: none, linear, yarn")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "vocab_size": value("llama.vocab_size", len(fields["tokenizer.ggml.tokens"].data)),
        "dtype": "float32",
        "_name_or_path": value("general.name", source.stem),
    }


def _target(source: Path, name: str) -> str:
    """Hugging Face's name of a tensor."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_LAYER and parts[3] == "weight":
        return f"model.layers.{int(parts[1])}.{_IN_LAYER[parts[2]]}.weight"
    raise UnexpectedTensors(f"{source}: {name} is not part of a LLaMA")


def _weights(gguf: Any, name: str, tensor: Any, config: dict[str, Any]) -> NDArray[np.float32]:
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(f"{name}: {tensor.tensor_type.name} cannot be de-quantised: {error}") from error
    values = np.ascontiguousarray(values, dtype=np.float32)
    part = name.split(".")[-2]
    if part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        # GGUF rotates neighbouring elements, Hugging Face the two halves of a head.
        pairs = values.reshape(heads, config["head_dim"] // 2, 2, -1)
        values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    return values


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
