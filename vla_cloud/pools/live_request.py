"""One request while the gateway serves it: its life, what its client has not read yet, and its messages to workers."""

from __future__ import annotations

import asyncio
import dataclasses

from vla_cloud.core import life_events as life
from vla_cloud.core.generate import GenerateRequest, seed_of
from vla_cloud.core.life_events import End, Fail
from vla_cloud.core.request_life import LifeConfig, RequestLife
from vla_cloud.core.router.prompt_hashes import PromptHashes
from vla_cloud.pools import messages as wire
from vla_cloud.pools.codec import pack_tokens
from vla_cloud.pools.events import TokenEvent
from vla_cloud.pools.messages import Ready, Reserved, TokenRow, Work

NS_PER_S = 1_000_000_000
MAX_EVENT_TOKENS = 64
"""Of one event: what gathered while a client did not read comes in pieces that neither fill its connection's buffer at
once (1.5 kB a token with log-probabilities) nor hold up the event loop, and that fit a message."""


class LiveRequest:
    """State that the service keeps per request; used in the event loop only.

    ``wire_id`` is what workers see: never used twice, so that a client may use its own id again while workers still
    clean up.
    """

    def __init__(
        self, request: GenerateRequest, number: int, max_new_tokens: int, deadline_ns: int, config: LifeConfig
    ) -> None:
        """``max_new_tokens``: what the request asks for, cut to what the model can give."""
        self.request = request
        self.trace = request.trace
        self.wire_id = f"{request.request_id[:96]}~{number}"
        stops = request.sampling.stop_token_ids
        self.life = RequestLife(len(request.tokens), max_new_tokens, stops, deadline_ns, config)
        self.sampling = dataclasses.replace(request.sampling, seed=seed_of(request))
        self.max_new_tokens = max_new_tokens
        self.prompt = pack_tokens(request.tokens)
        self.hashes = PromptHashes(request.salt, request.images)  # once for all attempts
        self.arrived_ns = 0
        self.begun = False
        self.placed: int | None = None  # attempt whose load is counted
        self.reserved: tuple[Ready, Reserved] | None = None  # of the present attempt
        self.timer: asyncio.TimerHandle | None = None
        self.timer_ns = 0
        self.wake = asyncio.Event()
        self.outcome: End | Fail | None = None
        self._unread: list[TokenRow] = []
        self.unread_tokens = 0

    def prompt_now(self) -> bytes:
        """The prompt and what was streamed, i32."""
        return self.prompt + pack_tokens(self.life.outputs)

    @property
    def tokens_left(self) -> int:
        """The most tokens that are still to come."""
        return self.max_new_tokens - len(self.life.outputs)

    def work(self, now_ns: int) -> Work:
        """What a worker is asked to compute in the present attempt."""
        sampling = dataclasses.replace(self.sampling, max_new_tokens=self.tokens_left)
        left_s = max(0.0, (self.life.deadline_ns - now_ns) / NS_PER_S)
        request, streamed = self.request, len(self.life.outputs)
        return Work(
            self.prompt_now(), sampling, left_s, streamed, request.priority, request.salt, list(request.images),
            request.grammar, b"" if self.trace is None else self.trace.trace,
        )  # fmt: skip

    def add(self, row: TokenRow) -> None:
        """Tokens for the client."""
        self._unread.append(row)
        self.unread_tokens += len(row.tokens)
        self.wake.set()

    def end(self, outcome: End | Fail) -> None:
        """It has ended."""
        self.outcome = outcome
        self.wake.set()

    def take(self) -> TokenEvent | None:
        """The oldest of what is unread, in pieces of MAX_EVENT_TOKENS: ``wake`` is set again while there is more."""
        count = tokens = 0
        for row in self._unread:
            if count and tokens + len(row.tokens) > MAX_EVENT_TOKENS:
                self.wake.set()
                break
            count, tokens = count + 1, tokens + len(row.tokens)
        rows = self._unread[:count]
        del self._unread[:count]
        self.unread_tokens -= tokens
        if not rows:
            return None
        if len(rows) == 1 and not rows[0].logprobs:  # nearly always
            return TokenEvent(self.request.request_id, tuple(rows[0].tokens))
        return TokenEvent(
            self.request.request_id,
            tuple(token for row in rows for token in row.tokens),
            tuple(value for row in rows for value in row.logprobs),
            tuple(tuple(top) for row in rows for top in row.top_logprobs),
        )


def event_of(worker: str, message: wire.ToGateway) -> life.Event | None:
    """What a worker's message means for its request; None for messages that are not about one request."""
    match message:
        case wire.Reserved(_, attempt):
            return life.Reserved(worker, attempt)
        case wire.Refused(_, attempt, code, text, retry_after_s):
            return life.Refused(worker, attempt, code, text, retry_after_s)
        case wire.Prefilled(_, attempt, cached_tokens, pushed_bytes):
            return life.Prefilled(worker, attempt, cached_tokens, pushed_bytes)
        case wire.PushFailed(_, attempt, code, text):
            return life.PushFailed(worker, attempt, code, text)
        case wire.Finished(_, attempt, reason, generated, cached_tokens):
            return life.WorkerFinished(worker, attempt, reason, generated, cached_tokens)
        case wire.Aborted(_, attempt):
            return life.Aborted(worker, attempt)
        case wire.Error(code, text, _, attempt, transfer):
            return life.Failed(worker, attempt, code, text, transfer)
    return None
