"""POST /v1/chat/completions: a question in, an answer in one piece or as server-sent events."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import msgspec

from vla_cloud.core.client import Client
from vla_cloud.core.generate import RequestError
from vla_cloud.gateway.chat import Chat
from vla_cloud.gateway.chat_types import AnswerEvent, Done, TextDelta, TokenLogprob, ToolCallDelta, Usage
from vla_cloud.gateway.http_errors import HttpError, http_error, internal_error
from vla_cloud.gateway.http_exchange import ClientGone, Exchange, ExchangeRules, Receive, Scope, Send
from vla_cloud.gateway.http_request import Question, parse
from vla_cloud.gateway.metrics import GatewayMetrics
from vla_common.clock import NS_PER_S, Clock

LOG = logging.getLogger(__name__)
DOOR: Final = "http"
CLIENT: Final = "vla.client"
"""Key of the :class:`Client` in an ASGI scope; there only where keys are asked for."""

_REPLACEMENT: Final = "\ufffd"
_encode: Final = msgspec.json.encode


class ChatEndpoint:
    """An ASGI application for one path."""

    def __init__(self, chat: Chat, metrics: GatewayMetrics, rules: ExchangeRules, clock: Clock) -> None:
        """Serves what ``chat`` does."""
        self._chat, self._metrics, self._rules, self._clock = chat, metrics, rules, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves ends it in the pools at once."""
        exchange = Exchange(scope, receive, send, self._rules)
        given = exchange.headers.get(b"idempotency-key") or exchange.headers.get(b"x-request-id")
        request_id = given.decode("latin-1") if given else f"chatcmpl-{uuid.uuid4().hex}"
        tracing = self._chat.tracing
        began_ns = 0 if tracing is None else self._clock.monotonic_ns()
        try:
            try:
                question = await self._question(exchange, request_id, scope.get(CLIENT))
            except HttpError as error:
                self._metrics.ended(DOOR, "refused", error.code, request_id)
                raise
            if tracing is not None:
                callers = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
                question = replace(question, request=tracing.begin(question.request, DOOR, callers, began_ns))
            await exchange.while_connected(self._answer(exchange, question))
        except ClientGone as gone:
            LOG.debug("request %s: %s", request_id, gone)
        except HttpError as error:
            await exchange.fail(error, ("x-request-id", request_id))
        except Exception:
            LOG.exception("request %s failed", request_id)
            if exchange.has_begun:
                raise  # the connection is cut: the answer must not look complete
            await exchange.fail(internal_error(), ("x-request-id", request_id))

    async def _question(self, exchange: Exchange, request_id: str, client: Client | None) -> Question:
        kind = exchange.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            # Also what keeps other sites' pages out: a browser asks before it sends this type elsewhere.
            raise HttpError(415, "invalid_request_error", "the content-type must be application/json")
        if b"content-encoding" in exchange.headers:
            raise HttpError(415, "invalid_request_error", "content-encoding is not supported: send plain JSON")
        chat, limits = self._chat, self._chat.limits
        body = await exchange.body()
        return parse(body, request_id, limits.max_messages, limits.max_parts, client=client, can_see=chat.can_see)

    async def _answer(self, exchange: Exchange, question: Question) -> None:
        request = question.request
        style = _Style(request.request_id, self._clock.wall_ns() // NS_PER_S, self._model(question))
        answer = self._metrics.observed(DOOR, request, self._chat.stream(request))
        try:
            async with aclosing(answer) as events:
                if question.stream:
                    await _stream(exchange, question, style, events)
                else:
                    await _whole(exchange, question, style, events)
        except Exception as error:
            if isinstance(error, ClientGone):
                raise
            if isinstance(error, RequestError):
                told = http_error(error)
            else:
                LOG.exception("request %s failed", request.request_id)
                told = internal_error()
            if not exchange.has_begun:
                raise told from error
            # After the first byte the status is out: the failure is an event, never an answer that merely stops.
            await exchange.write(b"data: " + told.body() + b"\n\n", more=False)

    def _model(self, question: Question) -> str:
        if question.request.model:
            return question.request.model
        names = self._chat.names_for(self._chat.clients.require(question.request.client))
        return names[0] if names else ""


class _Style:
    """The JSON around the pieces of one answer."""

    def __init__(self, request_id: str, created_s: int, model: str) -> None:
        self._common = {"id": request_id, "created": created_s, "model": model}

    def chunk(self, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._common, "object": "chat.completion.chunk", "choices": [], "usage": _usage(usage)}

    def whole(self, text: str, calls: list[dict[str, Any]], logprobs: Any, done: Done) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": done.finish_reason}
        return {**self._common, "object": "chat.completion", "choices": [choice], "usage": _usage(done.usage)}


async def _stream(
    exchange: Exchange, question: Question, style: _Style, events: AsyncGenerator[AnswerEvent, None]
) -> None:
    # A refusal before the first token is a status of its own, so nothing is sent until there is one.
    usage_field = {"usage": None} if question.include_usage else {}
    async for event in events:
        data = b""
        if not exchange.has_begun:
            await exchange.begin(
                200, "text/event-stream; charset=utf-8", ("cache-control", "no-cache"), ("x-accel-buffering", "no"),
                ("x-request-id", question.request.request_id),
            )  # fmt: skip
            data = _event(style.chunk({"role": "assistant", "content": ""}) | usage_field)
        if not isinstance(event, Done):
            logprobs = _logprobs(event.logprobs) if question.request.logprobs else None
            await exchange.write(data + _event(style.chunk(_delta(event), logprobs) | usage_field))
            continue
        data += _event(style.chunk({}, reason=event.finish_reason) | usage_field)
        if question.include_usage:
            data += _event(style.usage_chunk(event.usage))
        await exchange.write(data + b"data: [DONE]\n\n", more=False)


async def _whole(
    exchange: Exchange, question: Question, style: _Style, events: AsyncGenerator[AnswerEvent, None]
) -> None:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []
    async for event in events:
        if not isinstance(event, Done):
            logprobs += event.logprobs
            if isinstance(event, TextDelta):
                texts.append(event.text)
            elif event.index == len(calls):
                calls.append(_call(event))
            else:
                calls[event.index]["function"]["arguments"] += event.arguments
            continue
        told = _logprobs(tuple(logprobs)) if question.request.logprobs else None
        body = _encode(style.whole("".join(texts), calls, told, event))
        await exchange.answer(200, "application/json", body, ("x-request-id", question.request.request_id))


def _delta(event: TextDelta | ToolCallDelta) -> dict[str, Any]:
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if event.name:
        return {"tool_calls": [{"index": event.index, **_call(event)}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}


def _call(event: ToolCallDelta) -> dict[str, Any]:
    function = {"name": event.name, "arguments": event.arguments}
    return {"id": event.call_id, "type": "function", "function": function}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    details = None if usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens}
    return {
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens, "prompt_tokens_details": details,
    }  # fmt: skip


def _logprobs(rows: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    content = [
        _token(row.text, row.logprob)
        | {"top_logprobs": [_token(text, logprob) for _, text, logprob in row.top]}
        for row in rows
    ]  # fmt: skip
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    # Half a character has no text of its own, and which bytes it had is not known here.
    return {"token": text, "logprob": logprob, "bytes": None if _REPLACEMENT in text else list(text.encode())}
