"""JSON schemas and tools with SmolLM2 in real P and D workers; a D worker is killed in the middle of an answer."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="openai is not installed: pip install 'vla-runtime[dev]'")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'vla-runtime[dev]'")
pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'vla-runtime[structured]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("torch", reason="torch is not installed: pip install 'vla-runtime[chat]'")

from vla_cloud.config import CloudConfig, GatewayConfig, ServingConfig  # noqa: E402
from vla_cloud.engine.tokenizer import ChatTokenizer  # noqa: E402
from vla_cloud.gateway.doors import Doors  # noqa: E402
from vla_cloud.pools.serving_thread import ServingThread  # noqa: E402
from vla_cloud.pools.worker_settings import worker_specs  # noqa: E402
from vla_common.clock import SystemClock  # noqa: E402
from vla_models.chat_model import SMOLLM2, ChatModelMissing, chat_model_folder  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
PERSON = {
    "type": "object", "required": ["name", "age", "hobbies"],
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                   "hobbies": {"type": "array", "items": {"enum": ["chess", "running", "music"]}, "minItems": 1, "maxItems": 3}},
}  # fmt: skip
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}}, "required": ["city", "unit"]},
}}  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[ServingThread, Any]]:
    try:
        tokenizer = ChatTokenizer(chat_model_folder(SMOLLM2))
    except ChatModelMissing as error:
        pytest.skip(str(error))
    serving = ServingConfig(model=SMOLLM2, decode_workers=2, blocks=256, deadline_s=300.0, nice=0)
    config = CloudConfig(serving=serving, gateway=GatewayConfig(http_listen="127.0.0.1:0", drain_s=0.0))
    specs = [replace(spec, environment={**spec.environment, "PYTHONPATH": str(ROOT), "VLA_LOG": "error"}) for spec in worker_specs(serving)]
    thread = ServingThread(serving, SystemClock(), specs)
    doors = Doors(config, tokenizer, thread.service, SystemClock())
    thread.start()
    try:
        thread.call(doors.start())
        with openai.OpenAI(base_url=f"http://{doors._doors[0].url}/v1", api_key="none", max_retries=0, timeout=300.0) as client:  # type: ignore[attr-defined]
            yield thread, client
    finally:
        thread.call(doors.stop())
        thread.stop()


def ask(client: Any, text: str, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 200, **fields}
    return client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": text}], **fields)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_person_in_json(pools: tuple[ServingThread, Any], temperature: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(4 if temperature else 1):
        choice = ask(pools[1], "Anna is 31 and plays chess. Give her as JSON.", response_format=form, temperature=temperature, seed=seed).choices[0]
        person = json.loads(choice.message.content)
        jsonschema.validate(person, PERSON)
        assert choice.finish_reason == "stop"
        if not temperature:
            assert person["name"].startswith("Anna") and person["age"] == 31, person


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_the_weather_is_asked_for(pools: tuple[ServingThread, Any], choice: Any) -> None:
    done = ask(pools[1], "What is the weather in Paris, in celsius?", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).choices[0]
    (call,) = done.message.tool_calls
    assert done.finish_reason == "tool_calls" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    assert "Paris" in arguments["city"]


def test_with_auto_whatever_it_does_is_well_formed(pools: tuple[ServingThread, Any]) -> None:
    for text in ("What is the weather in Rome?", "Say hello."):
        choice = ask(pools[1], text, tools=[WEATHER], max_tokens=120).choices[0]
        for call in choice.message.tool_calls or [] if choice.finish_reason == "tool_calls" else []:
            jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
        assert choice.message.content or choice.message.tool_calls


def test_json_goes_on_when_its_worker_is_killed(pools: tuple[ServingThread, Any]) -> None:
    thread, client = pools
    schema = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 30, "maxItems": 30}
    form = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}

    def numbers() -> Any:
        return ask(client, "Write thirty numbers.", response_format=form, max_tokens=400, stream=True)

    whole = "".join(chunk.choices[0].delta.content or "" for chunk in numbers())
    jsonschema.validate(json.loads(whole), schema)
    pids = {info.name: info.pid for info in thread.supervisor.infos()}
    text, killed = "", threading.Event()
    for chunk in numbers():
        text += chunk.choices[0].delta.content or ""
        if len(text) > 40 and not killed.is_set():
            live = next(iter(thread.service._by_id.values()))
            assert live.life.decode is not None
            os.kill(pids[live.life.decode.partition(".")[0]], signal.SIGKILL)
            killed.set()
    assert killed.is_set() and text == whole
    end = time.monotonic() + 120.0
    while any(info.state != "ready" for info in thread.supervisor.infos()):
        assert time.monotonic() < end
        time.sleep(0.1)
