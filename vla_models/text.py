"""Word-level tokenizer of the demo policy: a vocabulary list in the manifest, nothing else.

A robot instruction with a word the policy never saw is refused by name instead of being mapped to ``<unk>``:
acting on a half-understood instruction is worse than not acting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PAD, UNK, BOS, SEP = "<pad>", "<unk>", "<bos>", "<sep>"
SPECIALS = (PAD, UNK, BOS, SEP)
_WORD = re.compile(r"[a-z0-9']+")


class UnknownWord(ValueError):
    """The instruction holds a word outside the policy's vocabulary."""


class InstructionTooLong(ValueError):
    """The instruction has more words than the policy's fixed text length."""


def words(text: str) -> list[str]:
    """Lower-case words of ``text`` without punctuation."""
    return _WORD.findall(text.casefold())


def tokenize(text: str, vocabulary: Sequence[str], length: int) -> list[int]:
    """Token ids ``[<bos>, words..., <sep>, <pad>...]`` of exactly ``length`` entries.

    Raises UnknownWord or InstructionTooLong, both with the remedy in the message.
    """
    index = {word: i for i, word in enumerate(vocabulary)}
    ids = [index[BOS]]
    for word in words(text):
        if word not in index:
            known = " ".join(w for w in vocabulary if w not in SPECIALS)
            raise UnknownWord(f"word {word!r} is not in the policy's vocabulary; it knows: {known}")
        ids.append(index[word])
    ids.append(index[SEP])
    if len(ids) > length:
        raise InstructionTooLong(
            f"{len(ids) - 2} words, the policy takes at most {length - 2}: shorten the instruction"
        )
    return ids + [index[PAD]] * (length - len(ids))
