"""The chat layer on a scripted service."""

import asyncio
import sys
import threading
from contextlib import aclosing
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from chat_service import ScriptedService, fail
from tiny_chat_tokenizer import END, prompt_of, tiny_tokenizer

from vla_cloud.core.generate import FinishReason, Priority, RequestError
from vla_cloud.gateway.chat import Chat, ServedModel, retry_after_s
from vla_cloud.gateway.chat_types import (
    ChatLimits,
    ChatRequest,
    Done,
    ImagePart,
    Message,
    SamplingDefaults,
    TextDelta,
    TextPart,
    Usage,
)
from vla_cloud.pools.events import TokenEvent
from vla_common.clock import NS_PER_S, ManualClock


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def user(text):
    return (Message("user", (TextPart(text),)),)


def ask(request_id="r", text="hi", **kwargs):
    return ChatRequest(request_id, user(text), **kwargs)


async def collect(chat, request):
    events = [event async for event in chat.stream(request)]
    assert isinstance(events[-1], Done) and all(isinstance(event, TextDelta) for event in events[:-1])
    return events[:-1], events[-1]


def answer(tokenizer, script, request=None, reason=FinishReason.STOP, **kwargs):
    """Deltas, end and service of one request."""
    service = ScriptedService(lambda _: script, reason, **kwargs)
    chat = Chat([ServedModel("tiny", tokenizer, service)], ManualClock())
    deltas, done = asyncio.run(collect(chat, request or ask()))
    chat.close()
    return deltas, done, service


def error_of(tokenizer, request, script=(), models=("tiny",), limits=None, service=None, clock=None):
    service = service or ScriptedService(lambda _: script)
    chat = Chat([ServedModel(name, tokenizer, service) for name in models], clock or ManualClock(), limits)
    with pytest.raises(RequestError) as info:
        asyncio.run(collect(chat, request))
    chat.close()
    assert not service.running and not chat._running
    return info.value, service


def test_the_conversation_goes_out_in_the_template_with_all_that_was_asked(tokenizer):
    messages = (
        Message("system", (TextPart("be "), TextPart("brief"))), Message("user", (TextPart("hi"),)),
    )  # fmt: skip
    request = ChatRequest(
        "r", messages, max_tokens=7, temperature=0.25, top_p=0.5, repetition_penalty=1.5, seed=2**64 - 1, logprobs=True,
        top_logprobs=3, priority=Priority.HIGH, deadline_ns=5 * NS_PER_S,
    )  # fmt: skip
    _, _, service = answer(tokenizer, [[65]], request)
    (sent,) = service.requests
    assert list(sent.tokens) == prompt_of(("system", "be brief"), ("user", "hi"))
    assert (sent.request_id, sent.priority, sent.deadline_ns) == ("r", Priority.HIGH, 5 * NS_PER_S)
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.25, 0.5, 1.5)
    assert (sampling.seed, sampling.max_new_tokens, sampling.logprobs) == (2**64 - 1, 7, 3)
    assert sampling.stop_token_ids == {END}


def test_what_a_request_does_not_say_is_as_the_model_has_it(tokenizer):
    service = ScriptedService(lambda _: [[*b"x", END]])
    usual = SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    chat = Chat([ServedModel("tiny", tokenizer, service, defaults=usual)], ManualClock())
    messages = (Message("user", (TextPart("hi"),)),)

    async def ask(**given):
        async with aclosing(chat.stream(ChatRequest("r", messages, **given))) as events:
            async for _ in events:
                pass
        sampling = service.requests[-1].sampling
        return sampling.temperature, sampling.top_p, sampling.repetition_penalty

    assert asyncio.run(ask()) == (0.2, 0.9, 1.1)
    assert asyncio.run(ask(temperature=0.0, repetition_penalty=1.0)) == (0.0, 0.9, 1.0)
    assert asyncio.run(ask(top_p=1.0)) == (0.2, 1.0, 1.1)
    chat.close()


def test_an_answer_is_text_tokens_and_usage_without_its_end_token(tokenizer):
    deltas, done, service = answer(tokenizer, [[*b"He"], [*b"llo", END]], cached_tokens=16)
    assert [delta.text for delta in deltas] == ["He", "llo"]
    assert [delta.tokens for delta in deltas] == [(*b"He",), (*b"llo",)]
    prompt = len(prompt_of(("user", "hi")))
    assert done == Done("stop", Usage(prompt, 6, 16)) and service.closed == ["r"]


def test_the_length_limit_is_named(tokenizer):
    _, done, _ = answer(tokenizer, [[65], [66]], reason=FinishReason.LENGTH)
    assert done.finish_reason == "length" and done.usage.completion_tokens == 2


def test_a_character_of_several_tokens_comes_out_whole(tokenizer):
    deltas, _, _ = answer(tokenizer, [[byte] for byte in "aé🙂b".encode()])
    assert [delta.text for delta in deltas] == ["a", "é", "🙂", "b"]
    assert [len(delta.tokens) for delta in deltas] == [1, 2, 4, 1]


def test_half_a_character_at_the_end_is_not_lost(tokenizer):
    deltas, _, _ = answer(tokenizer, [[65], [0xF0], [0x9F]], reason=FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas).startswith("A\ufffd")
    assert [token for delta in deltas for token in delta.tokens] == [65, 0xF0, 0x9F]


@pytest.mark.parametrize("sizes", [1, 2, 3, 100])
def test_a_stop_string_across_tokens_ends_the_answer_and_the_request(tokenizer, sizes):
    tokens = [*b"one two STOP three four"]
    script = [tokens[i : i + sizes] for i in range(0, len(tokens), sizes)]
    deltas, done, service = answer(tokenizer, script, ask(stop=("xyz", "STOP")))
    assert "".join(delta.text for delta in deltas) == "one two "
    assert (done.finish_reason, done.stop_string) == ("stop", "STOP")
    assert done.usage.completion_tokens == len("one two STOP")
    assert [token for delta in deltas for token in delta.tokens] == [*b"one two "]
    assert service.closed == ["r"]


def test_the_beginning_of_a_stop_string_comes_out_when_the_answer_ends(tokenizer):
    deltas, done, _ = answer(tokenizer, [[*b"a ST"], [*b"O"]], ask(stop=("STOP",)), FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "a STO" and done.finish_reason == "length"
    assert done.stop_string is None


def test_log_probabilities_run_along_with_text(tokenizer):
    event = TokenEvent("r", (65, 66), (-0.5, -1.5), (((65, -0.5), (90, -2.0)), ((66, -1.5), (END, -3.0))))
    deltas, _, _ = answer(tokenizer, [event], ask(logprobs=True, top_logprobs=2))
    (first, second) = deltas[0].logprobs
    assert (first.token, first.text, first.logprob) == (65, "A", -0.5)
    assert first.top == ((65, "A", -0.5), (90, "Z", -2.0)) and second.top[1] == (END, "", -3.0)


IMAGE = ChatRequest("r", (Message("user", (TextPart("what is this?"), ImagePart(url="http://x/y.png"))),))


@pytest.mark.parametrize(
    ("request_", "code", "told"),
    [
        (IMAGE, "INVALID_ARGUMENT", "no vision tower"),
        (ask(request_id=""), "INVALID_ARGUMENT", "request_id"),
        (ask(request_id="a b"), "INVALID_ARGUMENT", "request_id"),
        (ask(request_id="x" * 129), "INVALID_ARGUMENT", "request_id"),
        (ChatRequest("r", ()), "INVALID_ARGUMENT", "1 to"),
        (ChatRequest("r", (Message("robot", (TextPart("x"),)),)), "INVALID_ARGUMENT", "role 'robot'"),
        (ask(model="other"), "NOT_FOUND", "there is tiny"),
        (ask(max_tokens=0), "INVALID_ARGUMENT", "max_tokens"),
        (ask(stop=("a",) * 5), "INVALID_ARGUMENT", "at most 4"),
        (ask(stop=("",)), "INVALID_ARGUMENT", "stop string"),
        (ask(stop=("x" * 257,)), "INVALID_ARGUMENT", "stop string"),
        (ask(top_logprobs=3), "INVALID_ARGUMENT", "needs logprobs"),
        (ask(logprobs=True, top_logprobs=21), "INVALID_ARGUMENT", "top_logprobs"),
        (ask(priority=Priority.ROBOT), "INVALID_ARGUMENT", "robots"),
        (ask(text="x" * 101), "INVALID_ARGUMENT", "characters"),
        (ask(deadline_ns=-1), "DEADLINE_EXCEEDED", "passed"),
    ],
)
def test_what_can_never_be_answered_is_refused_before_any_work(tokenizer, request_, code, told):
    error, service = error_of(tokenizer, request_, limits=ChatLimits(max_chars=100))
    assert error.code == code and told in str(error) and not service.requests


def test_errors_of_the_pools_pass_through_with_their_delay(tokenizer):
    error, _ = error_of(tokenizer, ask(), [fail("RESOURCE_EXHAUSTED", "overloaded", 2.5)])
    assert error.code == "RESOURCE_EXHAUSTED" and retry_after_s(error) == 2.5
    error, _ = error_of(tokenizer, ask(), [[65], fail("UNAVAILABLE", "gone")])
    assert error.code == "UNAVAILABLE" and retry_after_s(error) is None


def test_the_model_is_chosen_by_name_and_the_first_is_the_default(tokenizer):
    async def go():
        one, two = ScriptedService(lambda _: [[49]]), ScriptedService(lambda _: [[50]])
        chat = Chat([ServedModel("one", tokenizer, one), ServedModel("two", tokenizer, two)], ManualClock())
        for model, text in (("", "1"), ("one", "1"), ("two", "2")):
            deltas, _ = await collect(chat, ask(model=model))
            assert deltas[0].text == text
        assert chat.model_names == ["one", "two"] and chat.is_serving
        one.serving = False
        assert chat.is_serving and not chat.is_model_serving("one")
        assert await chat.drain(1.0) and not chat.is_serving and one.draining and two.draining

    asyncio.run(go())
    with pytest.raises(ValueError, match="unique"):
        Chat([], ManualClock())


def test_an_id_that_is_being_served_is_refused_and_free_again_afterwards(tokenizer):
    async def go():
        service = ScriptedService(lambda _: [[65]], gate=asyncio.Event())
        chat = Chat([ServedModel("tiny", tokenizer, service)], ManualClock())
        first = asyncio.create_task(collect(chat, ask()))
        while not service.running:
            await asyncio.sleep(0)
        with pytest.raises(RequestError) as info:
            await collect(chat, ask())
        assert info.value.code == "ALREADY_EXISTS"
        service.gate.set()
        await first
        await collect(chat, ask())

    asyncio.run(go())


def test_closing_the_stream_aborts_the_request(tokenizer):
    async def go():
        service = ScriptedService(lambda _: [[65]] * 100)
        chat = Chat([ServedModel("tiny", tokenizer, service)], ManualClock())
        stream = chat.stream(ask())
        assert (await stream.__anext__()).text == "A" and service.running
        await stream.aclose()
        assert service.closed == ["r"] and not service.running and not chat.abort("r")

    asyncio.run(go())


def test_abort_ends_a_request_by_name_and_again_does_no_harm(tokenizer):
    async def go():
        service = ScriptedService(lambda _: [[65]], gate=asyncio.Event())
        chat = Chat([ServedModel("tiny", tokenizer, service)], ManualClock())
        task = asyncio.create_task(collect(chat, ask()))
        while not service.running:
            await asyncio.sleep(0)
        assert chat.abort("r") and not chat.abort("other")
        with pytest.raises(RequestError) as info:
            await task
        assert info.value.code == "CANCELLED" and not chat.abort("r")

    asyncio.run(go())


class SlowTokenizer:
    """Tokenises when it may; says where it was called."""

    def __init__(self, inner):
        self.inner, self.eos_token_ids = inner, inner.eos_token_ids
        self.may, self.threads = threading.Event(), []

    def chat(self, messages):
        self.threads.append(threading.current_thread())
        assert self.may.wait(10.0)
        return self.inner.chat(messages)

    def decode(self, tokens):
        return self.inner.decode(tokens)

    def stream(self, prompt=()):
        return self.inner.stream(prompt)


def test_long_conversations_are_tokenised_beside_the_loop_and_in_bounded_number(tokenizer):
    async def go():
        slow, service = SlowTokenizer(tokenizer), ScriptedService(lambda _: [[65]])
        limits = ChatLimits(inline_chars=10, max_tokenising=2)
        chat = Chat([ServedModel("tiny", slow, service)], ManualClock(), limits)
        tasks = [asyncio.create_task(collect(chat, ask(f"r{i}", "x" * 11))) for i in range(2)]
        while len(slow.threads) < 2:
            await asyncio.sleep(0.001)  # the loop is free
        with pytest.raises(RequestError) as info:
            await collect(chat, ask("r2", "x" * 11))
        assert info.value.code == "RESOURCE_EXHAUSTED" and retry_after_s(info.value)
        # One aborted, one whose client goes away: neither reaches the pools.
        assert chat.abort("r0")
        tasks[1].cancel()
        slow.may.set()
        with pytest.raises(RequestError) as info:
            await tasks[0]
        assert info.value.code == "CANCELLED"
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert not service.requests
        while chat._tokenising:
            await asyncio.sleep(0.001)
        await collect(chat, ask("r3", "x" * 11))
        await collect(chat, ask("r4", "x" * 10))
        assert threading.main_thread() not in slow.threads[:-1] and slow.threads[-1] is threading.main_thread()
        chat.close()

    asyncio.run(go())


def test_a_deadline_that_the_first_token_would_miss_is_refused_at_once(tokenizer):
    clock = ManualClock()

    async def go():
        service = ScriptedService(lambda _: [[65]], gate=asyncio.Event())
        chat = Chat([ServedModel("tiny", tokenizer, service)], clock)
        for number in range(20):
            service.gate.clear()
            text = "x" * (1 + 50 * (number % 5))
            task = asyncio.create_task(collect(chat, ask(f"r{number}", text)))
            while not service.running:
                await asyncio.sleep(0)
            clock.advance_ns(round(0.01 * len(text) * NS_PER_S))  # 10 ms per character
            service.gate.set()
            await task
        count = len(service.requests)
        with pytest.raises(RequestError) as info:
            await collect(chat, ask("late", "x" * 200, deadline_ns=clock.monotonic_ns() + NS_PER_S))
        assert info.value.code == "DEADLINE_EXCEEDED" and "expected after" in str(info.value)
        assert len(service.requests) == count
        await collect(chat, ask("enough", "x" * 200, deadline_ns=clock.monotonic_ns() + 5 * NS_PER_S))
        await collect(chat, ask("short", "x", deadline_ns=clock.monotonic_ns() + NS_PER_S))
        await collect(chat, ask("none", "x" * 200))

    asyncio.run(go())
