"""What a chat client asks and gets, in no transport's terms, and the checks that need no model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from vla_cloud.core.client import Client
from vla_cloud.core.generate import MAX_LOGPROBS, InvalidRequest, Priority, RequestError
from vla_cloud.core.grammar import Tool
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.core.request_trace import RequestTrace

ROLES = ("system", "user", "assistant", "tool")
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_ID_CHARS = 128
_ID = re.compile(rf"[!-~]{{1,{MAX_ID_CHARS}}}")  # what a header can carry


class UnknownModel(RequestError):
    """No model of this name is served."""

    code = "NOT_FOUND"


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a message: its bytes, or where it is (also a data: URL). Refused where the chat model cannot see."""

    data: bytes = b""
    media_type: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that an assistant made. ``arguments`` is JSON text of an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. ``role`` is one of ROLES; an assistant may have called tools, a tool answers the call ``call_id``."""

    role: str
    parts: tuple[TextPart | ImagePart, ...]
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""

    @property
    def text(self) -> str:
        """Its text parts, joined as they are."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """Its images."""
        return tuple(part for part in self.parts if isinstance(part, ImagePart))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """For requests that do not say: a model's own, as its generation_config.json has them."""

    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One question.

    Attributes:
        request_id: unique among those being answered.
        model: "" for the only one (or the first).
        max_tokens: None for the gateway's default; cut to what the model's context leaves.
        temperature, top_p, repetition_penalty: None for the model's own (SamplingDefaults); temperature 0 is greedy.
        seed: 0 .. 2**64 - 1; None for one derived from the id.
        stop: the answer ends before the first of these strings.
        logprobs, top_logprobs: log-probabilities of the tokens, and of so many of the likeliest at each position.
        priority: None for what is usual: normal, or that of the client's key.
        deadline_ns: monotonic; None for the gateway's default.
        session: the client's name for a conversation, which then stays on its workers where load allows; "" for none.
        client: who asks, found by the door; None where it does not ask for keys.
        grammar: what the answer must look like. With one of tools the answer has ToolCallDeltas.
        tools: what the model is told that it may call.
        trace: None unless this request is traced.
    """

    request_id: str
    messages: tuple[Message, ...]
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    priority: Priority | None = None
    deadline_ns: int | None = None
    session: str = ""
    client: Client | None = None
    grammar: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    trace: RequestTrace | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability; ``top``: token, its text and log-probability, likeliest first.

    ``text`` is the token's own: half a character comes out as U+FFFD.
    """

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer: text and tokens whose text is out now, as far as stop strings and characters allow.

    Only the last may have no text. Tokens that end the answer (EOS) are left out.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call: its id and name first, without arguments; then pieces of their JSON text."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. ``completion_tokens`` counts those computed, also EOS and those of a stop string.

    ``cached_tokens`` are part of the prompt's; None if not known (the answer was cut at a stop string).
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete. ``finish_reason`` is "stop" (EOS or a stop string), "length" or "tool_calls"."""

    finish_reason: str
    usage: Usage
    stop_string: str | None = None


AnswerEvent: TypeAlias = TextDelta | ToolCallDelta | Done
"""What an answer consists of; Done is the last."""


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Bounds of what is taken. Characters, not bytes.

    Attributes:
        max_parts: of all messages together.
        inline_chars: a longer conversation is tokenised in a thread.
        max_tokenising: conversations in, or waiting for, those threads; further ones are refused.
    """

    max_messages: int = 1024
    max_parts: int = 4096
    max_chars: int = 2_000_000
    default_max_tokens: int = 1024
    inline_chars: int = 8192
    max_tokenising: int = 64


def check_chat(request: ChatRequest, limits: ChatLimits, can_see: bool = False) -> None:
    """Raise InvalidRequest for what can never be answered, before any work; token counts and ranges come later.

    ``can_see``: whether the model takes images, which are then checked later, too.
    """
    if not _ID.fullmatch(request.request_id):
        raise InvalidRequest(f"request_id must be 1 to {MAX_ID_CHARS} visible ASCII characters")
    _check_messages(request.messages, limits, can_see)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {request.max_tokens}")
    if len(request.stop) > MAX_STOPS:
        raise InvalidRequest(f"{len(request.stop)} stop strings, at most {MAX_STOPS} are taken")
    for stop in request.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}")
    if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be 0 to {MAX_LOGPROBS}, got {request.top_logprobs}")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: set both")
    if request.priority is Priority.ROBOT:
        raise InvalidRequest("priority robot is for robots: use high, normal or low")


def _check_messages(messages: tuple[Message, ...], limits: ChatLimits, can_see: bool) -> None:
    if not 1 <= len(messages) <= limits.max_messages:
        raise InvalidRequest(f"a conversation has 1 to {limits.max_messages} messages, got {len(messages)}")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"message {index} has role {message.role[:40]!r}, expected one of {', '.join(ROLES)}")
        if message.images and not can_see:
            raise InvalidRequest(
                f"message {index} has an image, and this chat model has no vision tower: send text only"
            )
    _check_calls(messages)
    chars = sum(len(call.arguments) for message in messages for call in message.calls)
    chars += sum(len(part.text) for message in messages for part in message.parts if isinstance(part, TextPart))
    if chars > limits.max_chars:
        raise InvalidRequest(f"the conversation has {chars} characters, at most {limits.max_chars} are taken")


def _check_calls(messages: tuple[Message, ...]) -> None:
    known: set[str] = set()
    for index, message in enumerate(messages):
        if message.calls and message.role != "assistant":
            raise InvalidRequest(f"message {index} ({message.role}) has tool calls: only an assistant calls tools")
        known.update(call.call_id for call in message.calls)
        if message.call_id and message.call_id not in known:
            raise InvalidRequest(f"message {index} answers call {message.call_id[:80]!r}, which nobody made before it")
