"""Which P and which D take a request: what workers say they have cached, and what is placed on them.

A rule in three steps, for P and D alike, among the workers that are eligible:

1. imbalance first: if the loads differ by more than ``imbalance_tokens``, or ``imbalance_s`` of computing prompts if
   that is more, and by more than the factor ``imbalance_ratio``, the least loaded;
2. else the worker that served this session last;
3. else the scorer (``vla_cloud.core.router.scoring``): by default the least sum of load and tokens to compute, where
   a common beginning shorter than ``min_affinity_tokens`` does not count.

What is cached comes from the workers' events (``vla_cloud.core.router``); until a worker reports a prompt that was
placed there, it is expected to hold it, for a bounded time. A wrong guess costs time, never correctness, since workers
compare tokens.

Load is counted in tokens on every path, from placement to release: what a P has still to compute (prompt less the
beginning it has) and what a D holds or will hold (prompt plus answer). What a worker reports beyond that was placed by
others, and is added.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from vla_cloud.core.block_pool import BLOCK_TOKENS
from vla_cloud.core.router.chooser import STAGE_COUNTS, Chooser, WorkerState
from vla_cloud.core.router.event_feed import EventFeed
from vla_cloud.core.router.prefill_speed import PrefillSpeed
from vla_cloud.core.router.prefix_index import KvRow, PrefixIndex
from vla_cloud.core.router.prompt_hashes import PromptHashes
from vla_cloud.core.router.sessions import Sessions, session_key
from vla_cloud.core.router.settings import PlacementConfig
from vla_common.clock import NS_PER_S, Clock, SystemClock
from vla_common.metrics import Counters

__all__ = ["ROUTER_GAUGES", "Choice", "Demand", "Placement", "PlacementConfig"]

ROUTER_GAUGES: Final = ("index_blocks", "sessions")
"""What of :meth:`Placement.snapshot` may fall; the rest are counts since start."""

_COUNTS = (
    *(f"{stage}_{name}" for stage in ("prefill", "decode") for name in STAGE_COUNTS),
    "placed", "no_worker", "decode_alone", "prefill_preferred", "prompt_tokens", "prefill_cached_tokens",
    "blocks_stored", "blocks_removed", "blocks_confirmed", "blocks_unconfirmed", "blocks_refused",
    "event_gaps", "events_repeated", "events_ignored", "snapshots_asked", "snapshots_taken",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """Workers for one attempt. ``prefill`` None: ``decode`` does both. ``*_tokens``: load that was counted."""

    prefill: str | None
    decode: str
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed: a prompt's block hashes and lengths, whom to avoid, and the session it belongs to, if any.

    ``answer_tokens``: the most it may generate. ``session`` as of ``session_key``.
    """

    hashes: Sequence[bytes]
    prompt_tokens: int
    answer_tokens: int
    exclude: Collection[str] = ()
    prefer_prefill: str | None = None
    session: bytes = b""


@dataclass(slots=True)
class _Placed:
    """One attempt and its load; 0 once it is taken off."""

    choice: Choice
    prompt_tokens: int
    prompt_blocks: int
    prefill_tokens: int
    decode_tokens: int
    hashes: PromptHashes | None = field(default=None)


class Placement:
    """Knows the workers that may be given work, what they have cached, and their load."""

    def __init__(
        self, config: PlacementConfig, clock: Clock | None = None, rng: random.Random | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:  # fmt: skip
        """No worker yet. ``rng`` draws at temperatures above 0."""
        self._config, self._clock, self._block_tokens = config, clock or SystemClock(), block_tokens
        self.counters = Counters(*_COUNTS)
        self.index = PrefixIndex(self.counters)
        self._feed = EventFeed(self.index, config.snapshot_retry_s, self.counters)
        self._sessions = Sessions(config.session_s, config.max_sessions)
        self._workers: dict[str, WorkerState] = {}
        self._chooser = Chooser(config, rng or random.Random(0), self.counters, self._workers, block_tokens)
        self._placed: dict[tuple[str, int], _Placed] = {}
        self._speed = PrefillSpeed()

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
            self._workers[worker] = WorkerState(role)
            self._feed.add(worker, total_blocks)

    def drain(self, worker: str) -> None:
        """Place nothing more there."""
        if worker in self._workers:
            self._workers[worker].draining = True

    def remove(self, worker: str) -> None:
        """It is gone, and with it everything it had cached, and the load that was counted there."""
        self._workers.pop(worker, None)
        self._feed.remove(worker)
        self._speed.remove(worker)
        for placed in self._placed.values():
            if worker == placed.choice.prefill:
                placed.prefill_tokens = 0
            if worker == placed.choice.decode:
                placed.decode_tokens = 0

    def take_events(self, worker: str, first_sequence: int, rows: Sequence[KvRow]) -> bool:
        """A worker's KvEvents. True: events were lost, ask it for a snapshot."""
        return self._feed.take(worker, first_sequence, rows, self._clock.monotonic_ns())

    def take_load(self, worker: str, active_tokens: int) -> None:
        """A worker's ``Load.active_tokens``: what was not placed from here counts until the next report."""
        known = self._workers.get(worker)
        if known is not None:
            known.foreign_tokens = max(0, active_tokens - known.placed_tokens)

    def load_tokens(self, worker: str) -> int:
        """Tokens counted there now; 0 for an unknown worker."""
        return self._workers[worker].load_tokens if worker in self._workers else 0

    def snapshot(self) -> dict[str, int]:
        """All counts since start, and how much is remembered now."""
        gauges = zip(ROUTER_GAUGES, (len(self.index), len(self._sessions)), strict=True)
        return {**self.counters.snapshot(), **dict(gauges)}

    def choose(
        self, request_id: str, attempt: int, prompt: bytes, salt: bytes, answer_tokens: int,
        exclude: Collection[str] = (), prefer_prefill: str | None = None, hashes: PromptHashes | None = None,
        session: str = "",
    ) -> Choice | str:  # fmt: skip
        """Choose, and count the load until :meth:`release`.

        Args:
            prompt: i32 little-endian token ids. answer_tokens: the most it may generate.
            hashes: of the request's prompt so far (it knows its images); by default of ``prompt`` and ``salt``.
            session: name of the conversation, the tenant's own; "" for none.

        Returns:
            The choice, or why there is none.
        """
        known = PromptHashes(salt) if hashes is None else hashes
        missing = self._missing(exclude)
        if missing:  # before the prompt is hashed
            self.counters.add("no_worker")
            return missing
        beginning = known.extend(prompt[: 4 * self._config.max_prefix_tokens])
        key = session_key(salt, session)
        demand = Demand(beginning, len(prompt) // 4, answer_tokens, exclude, prefer_prefill, key)
        choice = self.place(request_id, attempt, demand)
        if isinstance(choice, Choice):
            self._placed[request_id, attempt].hashes = known
        return choice

    def place(self, request_id: str, attempt: int, demand: Demand) -> Choice | str:
        """:meth:`choose` for a prompt whose blocks are hashed."""
        now_ns = self._clock.monotonic_ns()
        self.index.expire(now_ns)
        config = self._config
        self._chooser.guard_tokens = max(config.imbalance_tokens, round(config.imbalance_s * self._speed.tokens_s))
        decodes = self._eligible(("decode", "both"), demand.exclude)
        prefills = self._eligible(("prefill",), demand.exclude)
        matched = self.index.match(demand.hashes) if decodes else {}
        last = self._sessions.find(demand.session, now_ns) if demand.session else (None, "")
        alone = self._alone(decodes, bool(prefills), matched, demand, last[1])
        if not decodes or (alone is None and not prefills):
            self.counters.add("no_worker")
            return self._none("prefill", ("prefill",)) if decodes else self._none("decode", ("decode", "both"))
        decode, prefill, prefill_tokens = alone, None, 0
        if decode is None:
            decode = self._chooser.pick("decode", decodes, matched, demand.prompt_tokens, last[1], False)
            prefill = self._pick_prefill(prefills, matched, demand, last[0])
            cached = matched.get(prefill, 0)
            prefill_tokens = max(1, demand.prompt_tokens - cached * self._block_tokens)
            self.counters.add("prefill_cached_tokens", min(demand.prompt_tokens, cached * self._block_tokens))
            self._count(prefill, prefill_tokens, demand.prompt_tokens)
            self._speed.begun(prefill, now_ns)
        decode_tokens = demand.prompt_tokens + min(demand.answer_tokens, self._config.expected_answer_tokens)
        self._count(decode, decode_tokens, decode_tokens)
        self._expect((prefill, decode), demand.hashes, matched, now_ns)
        if demand.session:
            self._sessions.note(demand.session, prefill, decode, now_ns)
        self.counters.add("placed")
        self.counters.add("prompt_tokens", demand.prompt_tokens)
        choice = Choice(prefill, decode, prefill_tokens, decode_tokens)
        blocks = len(demand.hashes)
        self._placed[request_id, attempt] = _Placed(
            choice, demand.prompt_tokens, blocks, prefill_tokens, decode_tokens
        )
        return choice

    def prefill_done(self, request_id: str, attempt: int) -> None:
        """P has computed the prompt. Idempotent."""
        self._prefill_over(request_id, attempt, True)

    def _prefill_over(self, request_id: str, attempt: int, is_done: bool) -> None:
        placed = self._placed.get((request_id, attempt))
        if placed is None or placed.choice.prefill is None or not placed.prefill_tokens:
            return
        worker, now_ns = placed.choice.prefill, self._clock.monotonic_ns()
        if is_done:
            self._speed.done(worker, placed.prefill_tokens, now_ns)
        else:
            self._speed.given_up(worker, now_ns)
        self._count(worker, -placed.prefill_tokens, -placed.prompt_tokens)
        placed.prefill_tokens = 0

    def finished(self, request_id: str, attempt: int, tokens: bytes) -> None:
        """The attempt ended well: D holds prompt and answer (``tokens``, as in :meth:`choose`), for a next turn."""
        placed = self._placed.get((request_id, attempt))
        if placed is not None and placed.hashes is not None:
            held = placed.hashes.extend(tokens[: 4 * self._config.max_prefix_tokens])
            self._expect((placed.choice.decode,), held[placed.prompt_blocks :], {}, self._clock.monotonic_ns())
        self.release(request_id, attempt)

    def release(self, request_id: str, attempt: int) -> None:
        """The attempt is over, however it ended. Idempotent."""
        self._prefill_over(request_id, attempt, False)
        placed = self._placed.pop((request_id, attempt), None)
        if placed is not None:
            self._count(placed.choice.decode, -placed.decode_tokens, -placed.decode_tokens)

    def _count(self, name: str, load_tokens: int, placed_tokens: int) -> None:
        worker = self._workers.get(name)
        if worker is not None and load_tokens:
            worker.load_tokens += load_tokens
            worker.placed_tokens += placed_tokens

    def _expect(
        self, names: Sequence[str | None], hashes: Sequence[bytes], matched: Mapping[str, int], now_ns: int
    ) -> None:
        until_ns = now_ns + round(self._config.unconfirmed_s * NS_PER_S)
        for name in names:
            if name is not None and self._config.unconfirmed_s:
                self.index.expect(name, hashes[matched.get(name, 0) :], until_ns)

    def _missing(self, exclude: Collection[str]) -> str:
        """Why no worker can be chosen, whatever the prompt; "" if one can."""
        if not self._eligible(("decode", "both"), exclude):
            return self._none("decode", ("decode", "both"))
        if self._eligible(("prefill", "both"), exclude) or self._config.skip_transfer_tokens:
            return ""
        return self._none("prefill", ("prefill",))

    def _none(self, kind: str, roles: Collection[str]) -> str:
        return f"no {kind} worker is ready" if not self._eligible(roles, ()) else f"no other {kind} worker"

    def _eligible(self, roles: Collection[str], exclude: Collection[str]) -> list[str]:
        return [
            name for name, worker in self._workers.items()
            if worker.role in roles and not worker.draining and name not in exclude
        ]  # fmt: skip

    def _alone(
        self, decodes: list[str], has_prefill: bool, matched: Mapping[str, int], demand: Demand, last: str
    ) -> str | None:
        """A worker that takes the request without P, if one should."""
        both = [name for name in decodes if self._workers[name].role == "both"]
        if both and not has_prefill:
            return self._chooser.pick("decode", both, matched, demand.prompt_tokens, last, True)
        limit = self._config.skip_transfer_tokens
        near = [
            name for name in decodes
            if demand.prompt_tokens - matched.get(name, 0) * self._block_tokens <= limit
        ] if limit else []  # fmt: skip
        if not near:
            return None
        self.counters.add("decode_alone")
        return self._chooser.pick("decode", near, matched, demand.prompt_tokens, last, True)

    def _pick_prefill(
        self, names: list[str], matched: Mapping[str, int], demand: Demand, last: str | None
    ) -> str:
        if demand.prefer_prefill in names:
            self.counters.add("prefill_preferred")
            assert demand.prefer_prefill is not None
            return demand.prefer_prefill
        return self._chooser.pick("prefill", names, matched, demand.prompt_tokens, last, True)
