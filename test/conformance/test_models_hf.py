"""The model code against transformers: a tiny random checkpoint loads and gives the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.clip import CLIPConfig, CLIPModel, CLIPVisionConfig, CLIPVisionModel
from transformers.models.llama import LlamaConfig as HfLlamaConfig
from transformers.models.llama import LlamaForCausalLM, LlamaModel
from transformers.models.siglip import SiglipConfig, SiglipModel, SiglipVisionConfig, SiglipVisionModel

from vla_models.llama import Llama
from vla_models.loaders import checkpoint as errors
from vla_models.loaders.huggingface import SUPPORTED_ARCHITECTURES, load_huggingface
from vla_models.vit import Vit

TOLERANCE = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMAS = {
    "multi-head": {},
    "grouped-query": {"num_key_value_heads": 2},
    "one key head, wide heads": {"num_key_value_heads": 1, "head_dim": 16},
    "tied embeddings": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
}
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 24, "patch_size": 8,
}  # fmt: skip
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}


def hf_llama(**options) -> LlamaForCausalLM:
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    # A wide initialisation: with the default the logits are so small that a wrong layer could hide in the tolerance.
    torch.manual_seed(0)
    return LlamaForCausalLM(HfLlamaConfig(**shape, initializer_range=0.3, **options)).eval()


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """Random values for all parameters, also the biases and norms that start at 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data = parameter.data + noise
    return model.eval()


def save(model: torch.nn.Module, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    return save(hf_llama(), tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["math", "sdpa"])
@pytest.mark.parametrize("options", LLAMAS.values(), ids=LLAMAS.keys())
def test_llama_matches_transformers_and_its_own_cache(tmp_path: Path, options: dict, attention: str) -> None:
    reference = widen(hf_llama(**options))
    model = load_huggingface(save(reference, tmp_path), attention=attention)
    assert isinstance(model, Llama)
    ids = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(2))
    expected = reference(ids).logits
    assert expected.abs().max() > 0.5

    hidden, kv = model(model.embed(ids))
    torch.testing.assert_close(model.logits(hidden), expected, atol=TOLERANCE, rtol=TOLERANCE)

    first, past = model(model.embed(ids[:, :25]))
    second, longer = model(model.embed(ids[:, 25:]), past)
    torch.testing.assert_close(torch.cat([first, second], dim=1), hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(longer[-1][0], kv[-1][0], atol=1e-5, rtol=1e-5)
    assert past[0][0].shape[2] == 25, "the caller's cache must not change"


@torch.no_grad()
def test_llama_without_head_sharded_and_in_bfloat16(tmp_path: Path) -> None:
    reference = widen(LlamaModel(hf_llama().config))
    save(reference, tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    ids = torch.arange(12).view(1, 12)
    model = load_huggingface(tmp_path)
    torch.testing.assert_close(model(model.embed(ids))[0], reference(ids).last_hidden_state, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(ValueError, match="lm_head"):
        model.logits(torch.zeros(1, 1, 32))
    assert load_huggingface(tmp_path, dtype=torch.bfloat16).embed_tokens.weight.dtype is torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("attention", ["math", "sdpa"])
@pytest.mark.parametrize(
    "build",
    [lambda: SiglipVisionModel(SiglipVisionConfig(**TOWER)), lambda: CLIPVisionModel(CLIPVisionConfig(**TOWER))],
    ids=["siglip", "clip"],
)
def test_vision_tower_matches_transformers(tmp_path: Path, build, attention: str) -> None:
    reference = widen(build())
    model = load_huggingface(save(reference, tmp_path), attention=attention)
    assert isinstance(model, Vit)
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(3))
    expected = reference(pixels).last_hidden_state
    torch.testing.assert_close(model(pixels), expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize(
    "build",
    [
        lambda: SiglipModel(SiglipConfig(text_config=TEXT, vision_config=TOWER)),
        lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=TOWER)),
    ],
    ids=["siglip", "clip"],
)
def test_vision_tower_inside_a_whole_checkpoint(tmp_path: Path, build) -> None:
    reference = widen(build())
    model = load_huggingface(save(reference, tmp_path))
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(4))
    expected = reference.vision_model(pixels).last_hidden_state
    torch.testing.assert_close(model(pixels), expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_layout_of_transformers_4_loads_the_same(tmp_path: Path) -> None:
    """Version 4 kept rope_theta beside rope_scaling, stored a tied head, and prefixed lone towers."""
    reference = widen(hf_llama(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True))
    folder = save(reference, tmp_path / "llama")
    old_scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_config(folder, rope_parameters=None, rope_theta=10000.0, rope_scaling=old_scaling)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model, ids = load_huggingface(folder), torch.arange(30).view(1, 30)
    logits = model.logits(model(model.embed(ids))[0])
    torch.testing.assert_close(logits, reference(ids).logits, atol=TOLERANCE, rtol=TOLERANCE)

    tower = widen(CLIPVisionModel(CLIPVisionConfig(**TOWER)))
    folder = save(tower, tmp_path / "clip")
    tensors = load_file(folder / "model.safetensors")
    prefixed = {f"vision_model.{name.removeprefix('vision_model.')}": value for name, value in tensors.items()}
    prefixed["vision_model.embeddings.position_ids"] = torch.arange(10).view(1, 10)
    save_file(prefixed, folder / "model.safetensors", metadata={"format": "pt"})
    pixels = torch.ones(1, 3, 24, 24)
    expected = tower(pixels).last_hidden_state
    torch.testing.assert_close(load_huggingface(folder)(pixels), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_missing_unexpected_and_misshaped_tensors_are_named(llama_folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    saved: dict[str, torch.Tensor] = {}
    edit_tensors(llama_folder, lambda t: saved.update({name: t.pop(name)}))
    with pytest.raises(errors.MissingTensors, match=name):
        load_huggingface(llama_folder)
    edit_tensors(llama_folder, lambda t: t.update({name: saved[name][:-1].clone()}))
    with pytest.raises(errors.ShapeMismatch, match=rf"{name}: shape \(47, 32\).*\(48, 32\)"):
        load_huggingface(llama_folder)
    edit_tensors(llama_folder, lambda t: t.update({name: saved[name], "model.layers.2.extra": torch.zeros(1)}))
    with pytest.raises(errors.UnexpectedTensors, match=r"model\.layers\.2\.extra"):
        load_huggingface(llama_folder)
    edit_tensors(llama_folder, lambda t: (t.pop("model.layers.2.extra"), t.update({name: saved[name].to(torch.int8)})))
    with pytest.raises(errors.UnsupportedDtype, match=name):
        load_huggingface(llama_folder)


def test_pickled_weights_are_refused_with_the_remedy(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").rename(llama_folder / "pytorch_model.bin")
    with pytest.raises(errors.UnsafeCheckpoint, match=r"pytorch_model\.bin.*save_pretrained"):
        load_huggingface(llama_folder)
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(errors.UnsafeCheckpoint, match="save_pretrained"):
        load_huggingface(llama_folder)


def test_unknown_architecture_names_the_supported_ones(llama_folder: Path) -> None:
    edit_config(llama_folder, architectures=["MambaForCausalLM"])
    with pytest.raises(errors.UnsupportedArchitecture, match="MambaForCausalLM") as caught:
        load_huggingface(llama_folder)
    assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"hidden_act": "relu"},
        {"quantization_config": {"bits": 4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
    ],
    ids=str,
)
def test_unsupported_options_are_refused(llama_folder: Path, changes: dict) -> None:
    edit_config(llama_folder, **changes)
    with pytest.raises(errors.UnsupportedConfig):
        load_huggingface(llama_folder)


def test_broken_folders_are_named(llama_folder: Path) -> None:
    weights = llama_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(errors.NotACheckpoint, match="not a complete safetensors file"):
        load_huggingface(llama_folder)
    weights.unlink()
    with pytest.raises(errors.NotACheckpoint, match="neither"):
        load_huggingface(llama_folder)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(errors.NotACheckpoint, match="not a file name in this folder"):
        load_huggingface(llama_folder)
    edit_config(llama_folder, hidden_size="wide")
    (llama_folder / "model.safetensors.index.json").unlink()
    weights.write_bytes(b"")
    with pytest.raises(errors.NotACheckpoint):
        load_huggingface(llama_folder)
    (llama_folder / "config.json").unlink()
    with pytest.raises(errors.NotACheckpoint, match=r"config\.json"):
        load_huggingface(llama_folder)
