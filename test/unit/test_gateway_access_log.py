"""One line per request: what happened, whose it was, and nothing that was said."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'vla-runtime[gateway]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from observed_gateway import MS, Observed

from vla_cloud.core.generate import QueueFull
from vla_cloud.gateway.chat_types import ChatRequest, Done, Message, TextDelta, TextPart, Usage
from vla_cloud.gateway.metrics import GatewayMetrics
from vla_common.logging_setup import JsonFormatter

SECRET = "the launch code is 12345"


def ask(metrics: GatewayMetrics, clock, request_id: str, error: Exception | None = None, model: str = "") -> None:
    async def answer() -> AsyncGenerator[TextDelta | Done, None]:
        clock.advance_ns(250 * MS)
        if error is not None:
            raise error
        yield TextDelta(SECRET, (1, 2))
        clock.advance_ns(50 * MS)
        yield Done("stop", Usage(20, 2, 16))

    async def go() -> None:
        request = ChatRequest(request_id, (Message("user", (TextPart(SECRET),)),), model)
        async for _ in metrics.observed("http", request, answer()):
            pass

    if error is None:
        asyncio.run(go())
    else:
        with pytest.raises(type(error)):
            asyncio.run(go())


def lines(caplog) -> list[dict]:
    return [json.loads(JsonFormatter("cloud").format(record)) for record in caplog.records]


def test_a_line_for_each_request_with_its_times_and_no_text(caplog) -> None:
    caplog.set_level(logging.INFO)
    observed = Observed()
    metrics = GatewayMetrics(observed.clock, dict, access_log=True)
    ask(metrics, observed.clock, "id1")
    ask(metrics, observed.clock, "id2", QueueFull(SECRET))
    metrics.ended("grpc", "refused", "INVALID_ARGUMENT")
    served, refused, unread = lines(caplog)
    assert served | {"time": "", "message": "", "pid": 0} == {
        "time": "", "pid": 0, "message": "", "level": "info", "process": "cloud", "request_id": "id1", "door": "http",
        "outcome": "served", "code": "OK", "first_token_s": 0.25, "total_s": 0.3, "prompt_tokens": 20,
        "cached_tokens": 16, "completion_tokens": 2,
    }  # fmt: skip
    assert served["message"] == "request id1 (http): served OK, 2 tokens, first after 0.250 s, all after 0.300 s"
    assert (refused["request_id"], refused["outcome"], refused["code"], refused["completion_tokens"]) == (
        "id2", "refused", "RESOURCE_EXHAUSTED", 0)  # fmt: skip
    assert (unread["request_id"], unread["door"]) == ("-", "grpc")
    assert SECRET not in caplog.text and "launch" not in json.dumps(lines(caplog))


def test_what_a_client_names_cannot_break_a_line(caplog) -> None:
    caplog.set_level(logging.INFO)
    observed = Observed()
    metrics = GatewayMetrics(observed.clock, dict, access_log=True)
    for request_id in ("a\nERROR forged", "x" * 500, "", "\x1b[31m"):
        ask(metrics, observed.clock, request_id, model="m" * 5000)
    for record, line in zip(caplog.records, lines(caplog), strict=True):
        assert line["request_id"] == "-" and len(line["model"]) <= 128
        assert "\n" not in record.getMessage() and "\x1b" not in record.getMessage() and len(record.getMessage()) < 200


def test_without_access_log_nothing_is_written(caplog) -> None:
    caplog.set_level(logging.INFO)
    observed = Observed()
    ask(GatewayMetrics(observed.clock, dict), observed.clock, "id1")
    assert not caplog.records
