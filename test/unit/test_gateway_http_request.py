"""What the HTTP door takes of a body, and what it refuses by name; the pages' numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="msgspec is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: pip install 'vla-runtime[gateway]'")
from prometheus_client.parser import text_string_to_metric_families

from vla_cloud.core.generate import DeadlineExceeded, QueueFull, RequestError, WorkerLost
from vla_cloud.gateway.chat_types import ChatRequest, Done, Message, TextDelta, TextPart, UnknownModel, Usage
from vla_cloud.gateway.http_errors import HttpError, http_error
from vla_cloud.gateway.http_request import Question, parse
from vla_cloud.gateway.metrics import GatewayMetrics
from vla_common.clock import SteppedClock

USER = {"role": "user", "content": "hi"}


def asked(**fields: Any) -> Question:
    return parse(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), "id", 10)


def refused(**fields: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


def test_the_least_is_a_model_and_a_message() -> None:
    question = asked()
    assert question == Question(ChatRequest("id", (Message("user", (TextPart("hi"),)),), "m"), False, False)
    assert (question.request.temperature, question.request.top_p, question.request.repetition_penalty) == (None, None, None)


def test_every_field_arrives() -> None:
    request = asked(
        max_tokens=5, temperature=0.5, top_p=0.9, seed=3, stop=["a", "b"], logprobs=True, top_logprobs=2,
        repetition_penalty=1.1, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert request.stream and request.include_usage
    assert request.request == ChatRequest(
        "id", (Message("user", (TextPart("hi"),)),), "m", 5, 0.5, 0.9, 1.1, 3, ("a", "b"), True, 2
    )
    assert asked(max_completion_tokens=7).request.max_tokens == 7 == asked(max_tokens=7, max_completion_tokens=7).request.max_tokens
    assert asked(stop="x").request.stop == ("x",)
    assert asked(prompt_cache_key="k").request.session == "k" and asked(prompt_cache_key=None).request.session == ""


def test_roles_and_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = asked(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts},
                               {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None}]).request.messages  # fmt: skip
    assert [(message.role, message.text) for message in messages] == [("system", "be brief"), ("user", "ab"), ("assistant", "ok")]


@pytest.mark.parametrize("fields", [
    {"user": "u"}, {"metadata": {"a": "b"}}, {"n": 1}, {"n": None}, {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"logit_bias": {}},
    {"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"store": False}, {"service_tier": "auto"},
    {"parallel_tool_calls": True}, {"modalities": ["text"]}, {"safety_identifier": "x"}, {"seed": None},
])  # fmt: skip
def test_what_asks_for_nothing_changes_nothing(fields: dict[str, Any]) -> None:
    assert asked(**fields) == asked()


@pytest.mark.parametrize(("fields", "param"), [
    ({"n": 2}, "n"), ({"presence_penalty": 0.1}, "presence_penalty"), ({"logit_bias": {"5": 1}}, "logit_bias"), ({"tools": [{}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"), ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"), ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"), ({"modalities": ["audio"]}, "modalities"), ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"top_k": 5}, "top_k"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"), ({"temperature": []}, "temperature"),
    ({"messages": []}, "messages"), ({"messages": [USER] * 11}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
    ({"messages": [{**USER, "name": "bob"}]}, "messages[0].name"), ({"messages": [{"role": "user", "x": 1}]}, "messages[...].x"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
])  # fmt: skip
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param is not None and error.param.replace("[0]", "").replace("[...]", "") == param.replace("[0]", "").replace("[...]", "")
    name = param.rpartition(".")[2].partition("[")[0]
    assert name in error.message and json.loads(error.body())["error"]["param"] == error.param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model":"\\ud800","messages":[]}', b"[" * 100_000, b'{"model":"m"}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])  # fmt: skip
def test_what_is_not_such_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        parse(body, "id", 10)
    assert caught.value.status == 400 and len(caught.value.body()) < 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["messages", "stop", "tools", "n", "metadata", "stream_options", "seed", "response_format", "x"]), JSON, max_size=3))
def test_any_json_is_taken_or_refused(fields: dict[str, Any]) -> None:
    try:
        asked(**fields)
    except HttpError as error:
        assert error.status == 400 and json.loads(error.body())["error"]["message"]


def test_errors_keep_their_meaning() -> None:
    def status(error: RequestError, retry_after_s: float = 0.0) -> tuple[int, dict[str, str]]:
        error.retry_after_s = retry_after_s  # type: ignore[attr-defined]
        told = http_error(error)
        return told.status, dict(told.headers)

    assert status(QueueFull("x"), 2.4) == (429, {"retry-after": "3", "retry-after-ms": "2400"})
    assert status(WorkerLost("x")) == (503, {"retry-after": "1", "retry-after-ms": "1000"})
    assert status(DeadlineExceeded("x")) == (504, {})
    assert status(UnknownModel("x")) == (404, {})
    assert status(RequestError("x")) == (500, {})
    unheard = RequestError("x")
    unheard.code = "DATA_LOSS"
    assert status(unheard) == (500, {})


HEALTH = {"serving": True, "draining": False, "active": 1, "queued": 2, "unsettled": 1, "retries": 3,
          "router": {"prefill_hits": 4, "index_blocks": 9}, "workers": [
    {"name": "w0", "role": "both", "state": "ready", "restarts": 1,
     "load": {"total_blocks": 10, "free_blocks": 6, "quarantined_blocks": 1, "running": 1, "waiting": 0}},
    {"name": "w1", "role": "both", "state": "starting", "restarts": 0, "load": None},
]}  # fmt: skip


def samples(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_answers_are_counted_with_their_times() -> None:
    clock = SteppedClock()
    metrics = GatewayMetrics(clock, lambda: {"m": HEALTH})

    async def answer(error: Exception | None) -> AsyncGenerator[TextDelta | Done, None]:
        clock.advance_ns(300_000_000)
        yield TextDelta("a", (1,))
        clock.advance_ns(60_000_000)
        yield TextDelta("bc", (2, 3))
        if error is not None:
            raise error
        yield Done("stop", Usage(20, 3, 16))

    async def refuse() -> AsyncGenerator[TextDelta | Done, None]:
        raise QueueFull("full")
        yield

    async def go() -> None:
        request = ChatRequest("id", ())
        assert len([event async for event in metrics.observed("http", request, answer(None))]) == 3
        for door, error in (("http", WorkerLost("x")), ("grpc", ValueError("x"))):
            with pytest.raises(type(error)):
                [event async for event in metrics.observed(door, request, answer(error))]
        with pytest.raises(QueueFull):
            [event async for event in metrics.observed("http", request, refuse())]
        left = metrics.observed("http", request, answer(None))
        await anext(left)
        await left.aclose()

    asyncio.run(go())
    got = samples(metrics)
    ends = {key[1:]: value for key, value in got.items() if key[0] == "vla_requests_total"}
    assert ends == {
        ("code=OK", "door=http", "outcome=served"): 1, ("code=UNAVAILABLE", "door=http", "outcome=failed"): 1,
        ("code=INTERNAL", "door=grpc", "outcome=failed"): 1, ("code=RESOURCE_EXHAUSTED", "door=http", "outcome=refused"): 1,
        ("code=CANCELLED", "door=http", "outcome=cancelled"): 1,
    }  # fmt: skip
    first, between = "vla_time_to_first_token_seconds", "vla_time_between_tokens_seconds"
    assert (got[(f"{first}_count",)], got[(f"{first}_bucket", "le=0.2")], got[(f"{first}_bucket", "le=0.5")]) == (4, 0, 4)
    assert got[(f"{between}_count",)] == 6 and got[(f"{between}_sum",)] == pytest.approx(0.18)
    assert (got[(f"{between}_bucket", "le=0.02")], got[(f"{between}_bucket", "le=0.05")]) == (0, 6)
    assert [got[("vla_tokens_total", f"kind={kind}")] for kind in ("prompt", "cached", "completion")] == [20, 16, 3]
    assert [got[("vla_kv_blocks", "model=m", f"state={state}", "worker=w0")] for state in ("free", "used", "quarantined")] == [6, 3, 1]
    assert (got[("vla_worker_up", "model=m", "role=both", "worker=w0")], got[("vla_worker_up", "model=m", "role=both", "worker=w1")]) == (1, 0)
    assert got[("vla_requests_present", "model=m", "state=queued")] == 2
    assert got[("vla_router_total", "event=prefill_hits", "model=m")] == 4
    assert got[("vla_router_known", "kind=index_blocks", "model=m")] == 9


def test_an_unheard_code_makes_no_new_label() -> None:
    metrics = GatewayMetrics(SteppedClock(), dict)
    metrics.ended("http", "failed", "WHATEVER")
    assert samples(metrics)[("vla_requests_total", "code=INTERNAL", "door=http", "outcome=failed")] == 1
