"""Request traces: the public one of Mooncake from a file, or a synthetic one of the same shape."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512
SOURCE = (
    "conversation_trace.jsonl in FAST25-release/traces of https://github.com/kvcache-ai/Mooncake (Apache-2.0); "
    "give its path with --trace"
)


@dataclass(frozen=True, slots=True)
class Request:
    """One line. ``blocks``: ids of its 512-token blocks; an id stands for a block and all before it."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read(path: Path) -> list[Request]:
    """ValueError names the line that is none of a trace."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            blocks = tuple(int(value) for value in row["hash_ids"])
            request = Request(row["timestamp"] / 1000.0, int(row["input_length"]), int(row["output_length"]), blocks)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no line of a Mooncake trace ({error}): {SOURCE}") from error
        if not blocks or not (len(blocks) - 1) * BLOCK_TOKENS < request.input_tokens <= len(blocks) * BLOCK_TOKENS:
            raise ValueError(f"{path}:{number} has {len(blocks)} blocks for {request.input_tokens} tokens: {SOURCE}")
        requests.append(request)
    return requests


def synthetic(count: int, seed: int, requests_s: float = 3.4) -> list[Request]:
    """Conversations that go on turn by turn, interleaved; all of them begin with one system prompt of a block."""
    rng = random.Random(seed)
    next_id, at_s = 1, 0.0
    open_turns: list[tuple[int, list[int]]] = []  # turns left, history
    requests = []
    for _ in range(count):
        at_s += rng.expovariate(requests_s)
        if open_turns and rng.random() < 0.55:
            turns, history = open_turns.pop(rng.randrange(len(open_turns)))
        else:
            turns, history = rng.choice((1, 1, 2, 3, 5, 8)), [0]
        new = min(200, 1 + int(rng.lognormvariate(2.2, 1.0)))
        blocks = [*history, *range(next_id, next_id + new)]
        next_id += new
        tokens = len(blocks) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        requests.append(Request(at_s, tokens, 1 + int(rng.expovariate(1 / 343)), tuple(blocks)))
        if turns > 1 and len(blocks) < 230:
            open_turns.append((turns - 1, blocks[:-1]))  # the last block is not full: the next turn fills it anew
    return requests


def most_reuse(requests: Sequence[Request]) -> float:
    """Share of blocks that one cache without bound would have: no router can do better."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        for count, block in enumerate(request.blocks):
            if block not in seen:
                found += count
                break
        else:
            found += len(request.blocks)
        seen.update(request.blocks)
    return found / max(1, sum(len(request.blocks) for request in requests))


def block_hash(block: int) -> bytes:
    """A name of 32 bytes, as chained hashes are."""
    return hashlib.sha256(block.to_bytes(8, "little")).digest()
