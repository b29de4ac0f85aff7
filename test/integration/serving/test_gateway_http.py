"""The HTTP door as the API's official client sees it, over real workers."""

from __future__ import annotations

import json
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError

import pytest

openai = pytest.importorskip("openai", reason="openai is not installed: pip install 'vla-runtime[dev]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
from http_rig import MODEL, HttpRig, body, http_rig  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from serving_rig import BASE, few  # noqa: E402

from vla_models.sampling import SamplingRule  # noqa: E402

QUESTION = "What is a robot?"
SLOW = {"CHAIN_STEP_S": "0.02", "CHAIN_MAX_MODEL_LEN": "2048"}


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with http_rig(tmp_path_factory.mktemp("tokenizer")) as it:
        yield it
        it.until(it.is_idle)


def client_of(rig: HttpRig):
    return openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=120.0)


@pytest.fixture(scope="module")
def client(rig: HttpRig):
    with client_of(rig) as it:
        yield it


def ask(client, question: str = QUESTION, **fields):
    fields = {"max_tokens": 12, "temperature": 0, **fields}
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}], **fields)


def get(rig: HttpRig, path: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(f"{rig.url}{path}", timeout=60) as response:
            return response.status, response.read(), dict(response.headers)
    except HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def test_an_answer_in_one_piece_is_the_engines(rig: HttpRig, client) -> None:
    done = ask(client)
    assert done.object == "chat.completion" and done.model == MODEL and done.id.startswith("chatcmpl-")
    choice = done.choices[0]
    assert choice.message.content == rig.expected(QUESTION, 12) and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and choice.logprobs is None
    prompt = rig.tokenizer.chat([{"role": "user", "content": QUESTION}])
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt), 12)
    assert done.usage.total_tokens == len(prompt) + 12


def test_a_stream_is_the_same_answer_in_pieces(rig: HttpRig, client) -> None:
    chunks = list(ask(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == rig.expected(QUESTION, 12) and len(chunks) >= 3
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_and_names_cached_tokens(client) -> None:
    question = "a question that is long enough for several blocks, asked twice"
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    ask(client, question, max_tokens=2)
    chunks = list(ask(client, question, max_tokens=2, **fields))
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached % 16 == 0 and 48 <= cached < usage.prompt_tokens


def test_sampling_follows_the_seed_and_the_temperature(rig: HttpRig, client) -> None:
    done = ask(client, temperature=0.5, seed=7)
    assert done.choices[0].message.content == rig.expected(QUESTION, 12, SamplingRule(temperature=0.5, seed=7))
    other = ask(client, temperature=0.5, seed=8)
    assert other.choices[0].message.content != done.choices[0].message.content


def test_the_answer_ends_before_a_stop_string(rig: HttpRig, client) -> None:
    whole = rig.expected(QUESTION, 12)
    stop = whole.split()[4]
    for stream in (False, True):
        got = ask(client, stop=[stop, "never said"], stream=stream)
        if stream:
            chunks = list(got)
            text, reason = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason
        else:
            text, reason = got.choices[0].message.content, got.choices[0].finish_reason
        assert text == whole[: whole.index(stop)] and reason == "stop"


def test_logprobs_run_along_with_the_text(client) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    rows = choice.logprobs.content
    assert "".join(row.token for row in rows).strip() == choice.message.content.strip() and len(rows) == 12
    assert all(len(row.top_logprobs) == 3 and row.top_logprobs[0].token == row.token for row in rows)
    streamed = [chunk.choices[0].logprobs for chunk in ask(client, logprobs=True, stream=True)]
    assert [row.logprob for piece in streamed if piece for row in piece.content] == [row.logprob for row in rows]


def test_what_is_not_served_is_refused_by_name(client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for fields, name in (
        ({"n": 2}, "n"), ({"response_format": schema}, "response_format"), ({"tools": [tool]}, "tools"),
        ({"presence_penalty": 0.5}, "presence_penalty"), ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"temperature": -1}, "temperature"), ({"max_tokens": 0}, "max_tokens"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **fields)
        assert name in caught.value.message and caught.value.type == "invalid_request_error", fields
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": image}])


def test_an_over_long_prompt_is_refused_before_any_work(rig: HttpRig, client) -> None:
    served = rig.thread.service.health()["served"]
    with pytest.raises(openai.BadRequestError, match="shorten the prompt"):
        ask(client, "x" * 600, stream=True)
    assert rig.thread.service.health()["served"] == served


def test_an_unknown_model_is_not_found(client) -> None:
    with pytest.raises(openai.NotFoundError, match="chain") as caught:
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_models_health_and_unknown_paths(rig: HttpRig, client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL
    status, text, _ = get(rig, "/health")
    assert status == 200 and json.loads(text)["status"] == "serving"
    status, text, _ = get(rig, "/v1/completions")
    assert status == 404 and "/v1/chat/completions" in json.loads(text)["error"]["message"]
    assert get(rig, "/v1/chat/completions")[0] == 405


def test_metrics_are_what_prometheus_reads(rig: HttpRig, client) -> None:
    ask(client)
    with pytest.raises(openai.BadRequestError):
        ask(client, n=3)
    status, page, headers = get(rig, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    samples = {(s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(page.decode()) for s in f.samples}

    def value(name: str, **labels: str) -> float:
        return samples[(name, *sorted(labels.items()))]

    assert value("vla_requests_total", door="http", outcome="served", code="OK") >= 1
    assert value("vla_requests_total", door="http", outcome="refused", code="INVALID_ARGUMENT") >= 1
    assert value("vla_time_to_first_token_seconds_count") >= 1
    assert value("vla_time_between_tokens_seconds_count") >= 0  # tokens that come together are one piece
    assert value("vla_tokens_total", kind="completion") >= 12 <= value("vla_tokens_total", kind="prompt")
    assert value("vla_worker_up", model=MODEL, worker="p0", role="prefill") == 1
    blocks = [value("vla_kv_blocks", model=MODEL, worker="d0", state=state) for state in ("free", "cached", "used", "quarantined")]
    assert sum(blocks) == 128
    assert value("vla_http_connections") >= 1 and value("vla_serving", model=MODEL) == 1
    assert value("vla_router_total", model=MODEL, event="placed") >= 1


def test_overload_is_a_rate_limit_with_a_delay_and_draining_is_unavailable(tmp_path: Path) -> None:
    with http_rig(tmp_path, SLOW, admission=few(max_active=1, max_queued=1), blocks=256) as rig, client_of(rig) as client:
        first = ask(client, stream=True, max_tokens=1500)
        next(first)
        waiting = threading.Thread(target=lambda: ask(client, max_tokens=1))
        waiting.start()
        rig.until(lambda: rig.thread.service.health()["queued"] == 1)
        with pytest.raises(openai.RateLimitError, match="overloaded") as caught:
            ask(client)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        first.close()
        waiting.join(timeout=60.0)
        assert not waiting.is_alive()
        rig.until(rig.is_idle)
        assert rig.thread.call(rig.chat.drain(5.0))
        status, text, headers = get(rig, "/health")
        assert status == 503 and json.loads(text)["status"] == "draining" and "retry-after" in headers
        with pytest.raises(openai.InternalServerError) as unavailable:
            ask(client)
        assert unavailable.value.status_code == 503 and "retry-after" in unavailable.value.response.headers


def test_a_failure_after_the_first_byte_is_an_error_event(tmp_path: Path) -> None:
    """vllm#52234, dynamo#13088: never a silent end, never wrong tokens with status 200."""
    import os
    import signal

    retry = replace(BASE.retry, capacity_wait_s=2.0)
    with http_rig(tmp_path, SLOW, blocks=256, deadline_s=30.0, retry=retry) as rig, client_of(rig) as client:
        chunks = ask(client, stream=True, max_tokens=1500)
        got = [next(chunks) for _ in range(3)]

        def kill() -> None:  # again and again: a worker that starts anew is killed, too
            while not stop.wait(0.05):
                for info in rig.thread.supervisor.infos():
                    if info.pid and info.state == "ready":
                        os.kill(info.pid, signal.SIGKILL)

        stop = threading.Event()
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with pytest.raises(openai.APIError) as caught:
                got += list(chunks)
        finally:
            stop.set()
            killer.join()
        assert caught.value.code in ("unavailable", "deadline_exceeded"), caught.value
        text = "".join(chunk.choices[0].delta.content or "" for chunk in got)
        assert text and rig.expected(QUESTION, 500).startswith(text)
        assert not any(chunk.choices[0].finish_reason for chunk in got)


def test_a_raw_stream_ends_with_done(rig: HttpRig) -> None:
    request = urllib.request.Request(
        f"{rig.url}/v1/chat/completions", json.dumps(body(stream=True)).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = response.read().split(b"\n\n")
        assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-2:] == [b"data: [DONE]", b""] and all(line.startswith(b"data: {") for line in lines[:-2])
