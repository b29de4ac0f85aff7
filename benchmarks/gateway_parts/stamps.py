"""A moment as a word: every token of this benchmark says when its engine gave it.

CLOCK_MONOTONIC is the same in every process of a machine, so the reader of a word knows how long it was under way.
A word is a number of ticks of 20 us modulo 65536: a token id of a vocabulary as large. Ways longer than 1.31 s come out
too short by a multiple of it. And the pace of answers: the seed of a request is the time between its tokens in
milliseconds, 0 for as fast as it goes.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

WORDS = 65_536
TICK_NS = 20_000
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def stamp() -> int:
    """Now."""
    return time.monotonic_ns() // TICK_NS % WORDS


def since_ms(word: int, now_ns: int) -> float:
    """From the word's moment to ``now_ns``."""
    return (now_ns // TICK_NS - word) % WORDS * (TICK_NS / 1e6)


def next_tick_s(period_s: float, phase: float, now_s: float) -> float:
    """Time until the next step of an engine that makes one every ``period_s``; ``phase`` in periods, 0 .. 1."""
    return period_s - (now_s - phase * period_s) % period_s


def write_tokenizer(folder: Path) -> None:
    """Questions are tokens of one byte each; the word of token i is `` i`` in digits; no token ends an answer.

    Needs the tokenizers package.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {f"Ġ{number}": number for number in range(WORDS)}
    vocabulary |= {letter: WORDS + index for index, letter in enumerate(sorted(letters))}
    vocabulary["<|end|>"] = WORDS + len(letters)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": vocabulary["<|end|>"]}), encoding="utf-8")
