"""Which P and which D take a request: prefix affinity and load, from what the gateway itself has placed and been told.

A rule in three steps, for P and D alike, among the workers that are eligible:

1. imbalance first: if the loads differ by more than ``imbalance_tokens`` and by more than the factor
   ``imbalance_ratio``, the least loaded;
2. else the worker that has seen the longest beginning of this prompt, if that is at least ``min_affinity_tokens``;
3. else the least loaded.

Load is counted in tokens on every path, from placement to release: what a P has still to compute (prompt less the
beginning it has seen) and what a D holds or will hold (prompt plus answer). What was seen is a bounded set of block
hashes per worker; a wrong guess costs time, never correctness, since workers compare tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from vla_cloud.core.block_pool import BLOCK_TOKENS

MAX_BLOCKS_SEEN: Final = 512
"""Beginning of a prompt that is looked at: 8192 tokens."""


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Thresholds, tokens.

    Attributes:
        skip_transfer_tokens: a prompt with at most so many tokens unseen by some decode worker is computed there,
            without P and transfer; 0: never.
    """

    min_affinity_tokens: int = 64
    imbalance_tokens: int = 8192
    imbalance_ratio: float = 1.5
    skip_transfer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Workers for one attempt. ``prefill`` None: ``decode`` does both. ``*_tokens``: load that was counted."""

    prefill: str | None
    decode: str
    prefill_tokens: int
    decode_tokens: int


class _Worker:
    def __init__(self, role: str, total_blocks: int) -> None:
        self.role, self.total_tokens = role, total_blocks * BLOCK_TOKENS
        self.max_seen = max(MAX_BLOCKS_SEEN, total_blocks)
        self.seen: OrderedDict[int, None] = OrderedDict()
        self.load_tokens = 0
        self.draining = False

    def seen_blocks(self, hashes: Sequence[int]) -> int:
        for count, value in enumerate(hashes):
            if value not in self.seen:
                return count
        return len(hashes)

    def see(self, hashes: Sequence[int]) -> None:
        for value in reversed(hashes):  # the beginning is used last, so it is forgotten last
            self.seen[value] = None
            self.seen.move_to_end(value)
        while len(self.seen) > self.max_seen:
            self.seen.popitem(last=False)


class Placement:
    """Knows the workers that may be given work, and their load."""

    def __init__(self, config: PlacementConfig) -> None:
        """No worker yet."""
        self._config = config
        self._workers: dict[str, _Worker] = {}
        self._placed: dict[tuple[str, int], Choice] = {}

    @property
    def can_serve(self) -> bool:
        """Workers are there for every stage of a request."""
        roles = {worker.role for worker in self._workers.values() if not worker.draining}
        return "both" in roles or roles >= {"prefill", "decode"}

    def add(self, worker: str, role: str, total_blocks: int) -> None:
        """A worker is ready, or has changed its role; ``total_blocks`` bounds what it can have cached."""
        known = self._workers.get(worker)
        if known is not None:
            known.role = role
        else:
            self._workers[worker] = _Worker(role, total_blocks)

    def drain(self, worker: str) -> None:
        """Place nothing more there."""
        if worker in self._workers:
            self._workers[worker].draining = True

    def remove(self, worker: str) -> None:
        """It is gone, and with it everything it had cached, and the load that was counted there."""
        self._workers.pop(worker, None)
        for key, choice in self._placed.items():
            if worker in (choice.prefill, choice.decode):
                prefill_tokens = 0 if worker == choice.prefill else choice.prefill_tokens
                decode_tokens = 0 if worker == choice.decode else choice.decode_tokens
                self._placed[key] = Choice(choice.prefill, choice.decode, prefill_tokens, decode_tokens)

    def load_tokens(self, worker: str) -> int:
        """Tokens counted there now; 0 for an unknown worker."""
        return self._workers[worker].load_tokens if worker in self._workers else 0

    def choose(
        self, request_id: str, attempt: int, prompt: bytes, salt: bytes, answer_tokens: int,
        exclude: Collection[str] = (), prefer_prefill: str | None = None,
    ) -> Choice | str:  # fmt: skip
        """Choose, and count the load until :meth:`release`.

        Args:
            prompt: i32 little-endian token ids. answer_tokens: the most it may generate.

        Returns:
            The choice, or why there is none.
        """
        hashes = block_hashes(prompt, salt)
        decodes = self._eligible(("decode", "both"), exclude)
        if not decodes:
            return self._none("decode", ("decode", "both"))
        prefills = self._eligible(("prefill",), exclude)
        prompt_tokens = len(prompt) // 4
        alone = self._alone(decodes, bool(prefills), hashes, prompt_tokens)
        if alone is None and not prefills:
            return self._none("prefill", ("prefill",))
        decode = alone if alone is not None else self._pick(decodes, hashes)
        decode_tokens = prompt_tokens + answer_tokens
        prefill, prefill_tokens = None, 0
        if alone is None:
            prefill = prefer_prefill if prefer_prefill in prefills else self._pick(prefills, hashes)
            worker = self._workers[prefill]
            prefill_tokens = max(1, prompt_tokens - worker.seen_blocks(hashes) * BLOCK_TOKENS)
            worker.see(hashes)
            worker.load_tokens += prefill_tokens
        self._workers[decode].see(hashes)
        self._workers[decode].load_tokens += decode_tokens
        choice = Choice(prefill, decode, prefill_tokens, decode_tokens)
        self._placed[request_id, attempt] = choice
        return choice

    def prefill_done(self, request_id: str, attempt: int) -> None:
        """P's part is over. Idempotent."""
        choice = self._placed.get((request_id, attempt))
        if choice is not None and choice.prefill is not None and choice.prefill_tokens:
            self._take_off(choice.prefill, choice.prefill_tokens)
            self._placed[request_id, attempt] = Choice(choice.prefill, choice.decode, 0, choice.decode_tokens)

    def finished(self, request_id: str, attempt: int, tokens: bytes, salt: bytes) -> None:
        """The attempt ended well: D holds prompt and answer (``tokens``, as in :meth:`choose`), for a next turn."""
        choice = self._placed.get((request_id, attempt))
        if choice is not None and choice.decode in self._workers:
            self._workers[choice.decode].see(block_hashes(tokens, salt))
        self.release(request_id, attempt)

    def release(self, request_id: str, attempt: int) -> None:
        """The attempt is over, however it ended. Idempotent."""
        self.prefill_done(request_id, attempt)
        choice = self._placed.pop((request_id, attempt), None)
        if choice is not None:
            self._take_off(choice.decode, choice.decode_tokens)

    def _take_off(self, name: str, tokens: int) -> None:
        if name in self._workers:
            self._workers[name].load_tokens -= tokens

    def _none(self, kind: str, roles: Collection[str]) -> str:
        return f"no {kind} worker is ready" if not self._eligible(roles, ()) else f"no other {kind} worker"

    def _eligible(self, roles: Collection[str], exclude: Collection[str]) -> list[str]:
        return [
            name for name, worker in self._workers.items()
            if worker.role in roles and not worker.draining and name not in exclude
        ]  # fmt: skip

    def _alone(self, decodes: list[str], has_prefill: bool, hashes: Sequence[int], prompt_tokens: int) -> str | None:
        """A worker that takes the request without P, if one should."""
        both = [name for name in decodes if self._workers[name].role == "both"]
        if both and not has_prefill:
            return self._pick(both, hashes)
        limit = self._config.skip_transfer_tokens
        near = [
            name for name in decodes
            if prompt_tokens - self._workers[name].seen_blocks(hashes) * BLOCK_TOKENS <= limit
        ]  # fmt: skip
        return self._pick(near, hashes) if limit and near else None

    def _pick(self, names: Sequence[str], hashes: Sequence[int]) -> str:
        config, workers = self._config, self._workers
        loads = {name: workers[name].load_tokens for name in names}
        least = min(names, key=loads.__getitem__)
        low, high = loads[least], max(loads.values())
        if high - low > config.imbalance_tokens and high > config.imbalance_ratio * low:
            return least
        seen = {name: workers[name].seen_blocks(hashes) for name in names}
        longest = max(seen.values())
        if longest and longest * BLOCK_TOKENS >= config.min_affinity_tokens:
            return min((name for name in names if seen[name] == longest), key=loads.__getitem__)
        return least


def block_hashes(prompt: bytes, salt: bytes) -> list[int]:
    """Chained hashes of the prompt's whole blocks, the first ``MAX_BLOCKS_SEEN``; valid within this process only."""
    size = 4 * BLOCK_TOKENS
    value, hashes = hash(salt), []
    for start in range(0, min(len(prompt) // size, MAX_BLOCKS_SEEN) * size, size):
        value = hash((value, prompt[start : start + size]))
        hashes.append(value)
    return hashes
