"""A tokenizer folder made on the spot: one token per byte, words that no text encodes to, ChatML, 997 tokens.

The vocabulary is as large as that of the hash-chain runner (kv_chain_runner.VOCAB), whose tokens therefore all have a
text. Needs the tokenizers package.
"""

from __future__ import annotations

import json
from pathlib import Path

from vla_cloud.engine.tokenizer import ChatTokenizer

VOCAB = 997
START, END = 995, 996
"""<|im_start|> and <|im_end|>; the latter ends an answer."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(folder: Path) -> ChatTokenizer:
    """Write the folder and load it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    vocabulary |= {f"Ġw{number}": number for number in range(256, START)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return ChatTokenizer(folder)


def prompt_of(*turns: tuple[str, str]) -> list[int]:
    """Tokens of a conversation, by hand."""
    tokens = []
    for role, text in turns:
        tokens += [START, *f"{role}\n{text}".encode(), END, ord("\n")]
    return [*tokens, START, *b"assistant\n"]


def _byte_of(letter: str) -> int:
    """The byte that a letter of GPT-2's alphabet stands for: printable ones for themselves, the others in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    code = ord(letter)
    return code if code in plain else others[code - 256]
