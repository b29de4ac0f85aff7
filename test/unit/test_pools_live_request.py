"""What gathers for a client that does not read comes in order, whole, and in pieces of bounded size."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed: pip install 'vla-runtime[cloud]'")
from vla_cloud.core.generate import GenerateRequest, SamplingParams
from vla_cloud.core.request_life import LifeConfig
from vla_cloud.pools.live_request import MAX_EVENT_TOKENS, LiveRequest
from vla_cloud.pools.messages import TokenRow

LIFE = LifeConfig(max_failures=1, capacity_wait_s=1.0, settle_s=1.0, transfer_late_s=1.0)


def live_request() -> LiveRequest:
    return LiveRequest(GenerateRequest("r", (1,), SamplingParams(max_new_tokens=9999)), 1, 9999, 10**12, LIFE)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_bounded_and_nothing_is_lost(seed: int) -> None:
    rng, live = random.Random(seed), live_request()
    sent: list[int] = []
    got: list[int] = []
    while len(sent) < 2000 or live.unread_tokens:
        for _ in range(rng.randrange(150) if len(sent) < 2000 else 0):
            tokens = [rng.randrange(1000) for _ in range(rng.choice((1, 1, 1, 3, 100)))]
            logprobs = [-float(token) for token in tokens]
            live.add(TokenRow("r~1", 0, len(sent), tokens, logprobs, [[(token, -1.0)] for token in tokens]))
            sent += tokens
        if not live.wake.is_set():
            assert not live.unread_tokens
            continue
        live.wake.clear()
        event = live.take()
        assert event is not None and len(event.tokens) <= max(MAX_EVENT_TOKENS, 100)
        assert event.logprobs == tuple(-float(token) for token in event.tokens)
        assert event.top_logprobs == tuple(((token, -1.0),) for token in event.tokens)
        got += event.tokens
        assert live.wake.is_set() == bool(live.unread_tokens) and len(got) + live.unread_tokens == len(sent)
    assert got == sent and live.take() is None
