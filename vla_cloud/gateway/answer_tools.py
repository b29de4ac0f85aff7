"""Calls of tools read out of an answer while it grows."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from vla_cloud.core.tool_calls import CallArguments, CallBegun, Text, ToolCallReader, ToolEvent
from vla_cloud.gateway.chat_types import AnswerEvent, Done, TextDelta, TokenLogprob, ToolCallDelta


async def with_tool_calls(answer: AsyncGenerator[AnswerEvent, None]) -> AsyncGenerator[AnswerEvent, None]:
    """The same answer, its calls as events of their own; close it as the answer itself.

    The end's ``finish_reason`` is "tool_calls" if there was a call and the answer was not cut.
    """
    reader, held = ToolCallReader(), _Tokens()
    async with aclosing(answer) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                held.add(event)
                for delta in _deltas(reader.push(event.text), held):
                    yield delta
            elif isinstance(event, Done):
                for delta in _deltas(reader.finish(), held):
                    yield delta
                if held.tokens:  # their text was a mark of the form alone
                    yield held.give(TextDelta(""))
                is_whole = reader.calls > 0 and event.finish_reason == "stop" and event.stop_string is None
                yield replace(event, finish_reason="tool_calls") if is_whole else event
            else:
                yield event


class _Tokens:
    """Tokens whose text has not led to an event yet: the next one gets them."""

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self._logprobs: tuple[TokenLogprob, ...] = ()

    def add(self, event: TextDelta) -> None:
        self.tokens += event.tokens
        self._logprobs += event.logprobs

    def give(self, delta: TextDelta) -> TextDelta:
        tokens, logprobs = self.tokens, self._logprobs
        self.tokens, self._logprobs = (), ()
        return replace(delta, tokens=tokens, logprobs=logprobs)

    def give_call(self, delta: ToolCallDelta) -> ToolCallDelta:
        tokens, logprobs = self.tokens, self._logprobs
        self.tokens, self._logprobs = (), ()
        return replace(delta, tokens=tokens, logprobs=logprobs)


def _deltas(events: list[ToolEvent], held: _Tokens) -> list[TextDelta | ToolCallDelta]:
    deltas: list[TextDelta | ToolCallDelta] = []
    for event in events:
        match event:
            case Text(text):
                deltas.append(held.give(TextDelta(text)))
            case CallBegun(index, name):
                deltas.append(held.give_call(ToolCallDelta(index, f"call_{uuid.uuid4().hex[:24]}", name)))
            case CallArguments(index, text):
                deltas.append(held.give_call(ToolCallDelta(index, arguments=text)))
    return deltas
