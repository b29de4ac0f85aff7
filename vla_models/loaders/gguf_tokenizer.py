"""The byte-level BPE tokenizer inside a GGUF file, written as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_models.loaders.checkpoint import NotACheckpoint, UnsupportedConfig

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class GgufTokenizer:
    """What a GGUF file says of its tokenizer; ids index ``tokens``."""

    tokens: list[str]
    token_types: list[int]
    merges: list[tuple[str, str]]
    pre: str
    bos_id: int | None
    eos_id: int
    chat_template: str | None

    @staticmethod
    def read(source: Path, fields: Mapping[str, Callable[[], Any]]) -> GgufTokenizer:
        """From the metadata of ``source``: a function per key that gives its value.

        Raises UnsupportedConfig for a tokenizer that is not byte-level BPE, NotACheckpoint for an incomplete one.
        """

        def value(key: str) -> Any:
            if f"tokenizer.ggml.{key}" not in fields:
                raise NotACheckpoint(f"{source}: no tokenizer.ggml.{key}")
            return fields[f"tokenizer.ggml.{key}"]()

        kind, pre = value("model"), value("pre")
        if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
            raise UnsupportedConfig(
                f"{source}: tokenizer {kind!r} with pre-tokenizer {pre!r}; supported: gpt2 with "
                f"{', '.join(_PRE_TOKENIZERS)}. Use the model's Hugging Face folder instead"
            )
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in value("merges"))]
        bos = value("bos_token_id") if "tokenizer.ggml.bos_token_id" in fields else None
        template = fields["tokenizer.chat_template"]() if "tokenizer.chat_template" in fields else None
        return GgufTokenizer(value("tokens"), value("token_type"), merges, pre, bos, value("eos_token_id"), template)


def write_tokenizer(spec: GgufTokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into ``folder``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(spec.tokens)}, merges=spec.merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[spec.pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(spec.tokens, spec.token_types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if spec.bos_id is None else spec.tokens[spec.bos_id],
        "eos_token": spec.tokens[spec.eos_id],
        "chat_template": spec.chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2, "default": _gpt2, "smollm": _smollm, "llama-bpe": _llama3,
}  # fmt: skip
"""tokenizer.ggml.pre -> how text is cut before merging, as llama.cpp does for that name."""
