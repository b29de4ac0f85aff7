"""The body of POST /v1/chat/completions: checked field by field, nothing that is not served is dropped in silence.

The body has no place for nested values but the schemas of response_format and tools, whose depth is bounded where they
are read: anything deeper is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import msgspec

from vla_cloud.core.client import Client
from vla_cloud.core.generate import InvalidRequest
from vla_cloud.gateway.chat_types import ChatRequest, ImagePart, Message, TextPart
from vla_cloud.gateway.http_errors import HttpError, bad_request
from vla_cloud.gateway.http_structured import tool_calls, wishes

_NULL: Final = msgspec.Raw(b"null")

# Fields that are not served, with the values that ask for nothing: clients send them unasked.
_NEUTRAL: Final[dict[str, tuple[str, ...]]] = {
    "n": ("1",),
    "presence_penalty": ("0", "0.0"),
    "frequency_penalty": ("0", "0.0"),
    "logit_bias": ("{}",),
    "functions": ("[]",),
    "function_call": ('"none"', '"auto"'),
    "modalities": ('["text"]',),
    "store": ("false",),
    "service_tier": ('"auto"', '"default"'),
}
_NEUTRAL_OF_MESSAGE: Final[dict[str, tuple[str, ...]]] = {
    "name": (), "refusal": (), "function_call": (), "audio": (), "annotations": ("[]",),
}  # fmt: skip
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
                 "tool": "tool"}  # fmt: skip
_PLACE: Final = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_FIELD: Final = re.compile(r"field `(.*?)`")


class _Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    pass


class _Part(_Strict, frozen=True):
    type: str
    text: str | None = None
    image_url: msgspec.Raw = _NULL
    input_audio: msgspec.Raw = _NULL
    file: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL


class _ImageUrl(_Strict, frozen=True):
    url: str
    detail: str | None = None  # without effect: every image is read whole


class _Message(_Strict, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    name: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL
    tool_calls: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    audio: msgspec.Raw = _NULL
    annotations: msgspec.Raw = _NULL
    tool_call_id: str | None = None


class _StreamOptions(_Strict, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(_Strict, frozen=True):
    messages: list[_Message]
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None
    response_format: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    tool_choice: msgspec.Raw = _NULL
    parallel_tool_calls: bool | None = None
    # Without effect here, and none is missed.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    # See _NEUTRAL.
    n: msgspec.Raw = _NULL
    presence_penalty: msgspec.Raw = _NULL
    frequency_penalty: msgspec.Raw = _NULL
    logit_bias: msgspec.Raw = _NULL
    functions: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    modalities: msgspec.Raw = _NULL
    store: msgspec.Raw = _NULL
    service_tier: msgspec.Raw = _NULL


@dataclass(frozen=True)
class Question:
    """One call: the request for the engine, and how the client wants the answer."""

    request: ChatRequest
    stream: bool
    include_usage: bool


_DECODER: Final = msgspec.json.Decoder(_Body)
_IMAGE_DECODER: Final = msgspec.json.Decoder(_ImageUrl)


def parse(
    body: bytes, request_id: str, max_messages: int, max_parts: int = 4096, *, client: Client | None = None,
    can_see: bool = False,
) -> Question:  # fmt: skip
    """Check and translate. ``max_parts``: of all messages together.

    ``client``: who asks. ``can_see``: whether there is a model that takes images, which are not looked into here.

    Raises:
        HttpError: 400, names the field.
    """
    given = _decode(body)
    for name, neutral in _NEUTRAL.items():
        _require_neutral(getattr(given, name), neutral, name)
    if given.stream_options is not None:
        if not given.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        if given.stream_options.include_obfuscation:
            raise _not_served("stream_options.include_obfuscation", "stream_options.include_obfuscation")
    if not 1 <= len(given.messages) <= max_messages:
        told = f"messages has {len(given.messages)} entries, 1 to {max_messages} are taken"
        raise bad_request(told, "messages")
    parts = sum(len(message.content) for message in given.messages if isinstance(message.content, list))
    if parts > max_parts:
        raise bad_request(f"messages have {parts} parts, at most {max_parts} are taken", "messages")
    if given.top_logprobs and not given.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    messages = tuple(_message(message, f"messages[{index}]", can_see) for index, message in enumerate(given.messages))
    request = _request(given, messages, request_id, client)
    options = given.stream_options
    return Question(request, bool(given.stream), options is not None and bool(options.include_usage))


def _decode(body: bytes) -> _Body:
    try:
        return _DECODER.decode(body)
    except RecursionError:
        raise bad_request("the JSON is nested too deeply") from None
    except msgspec.ValidationError as error:
        told = str(error)
        place, field = _PLACE.search(told), _FIELD.search(told)
        path = [place.group(1)] if place and place.group(1) else []
        param = ".".join(path + ([field.group(1)] if field else [])) or None
        if "unknown field" in told:
            raise _not_served(param or "a field", param) from None
        raise bad_request(told.replace("`$.", "`").replace("`$`", "the body"), param) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None


def _request(given: _Body, messages: tuple[Message, ...], request_id: str, client: Client | None) -> ChatRequest:
    limits = {given.max_tokens, given.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_request("max_tokens and max_completion_tokens differ: give one", "max_tokens")
    stop = given.stop
    grammar, tools = wishes(given.response_format, given.tools, given.tool_choice, given.parallel_tool_calls)
    try:
        return ChatRequest(
            request_id, messages, given.model, limits.pop() if limits else None,
            given.temperature, given.top_p, given.repetition_penalty, given.seed,
            () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
            bool(given.logprobs), given.top_logprobs or 0, session=given.prompt_cache_key or "", client=client,
            grammar=grammar, tools=tools,
        )  # fmt: skip
    except InvalidRequest as error:
        raise bad_request(str(error)) from error


def _message(message: _Message, place: str, can_see: bool) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise _not_served(f"role {message.role!r}", f"{place}.role", "system, developer, user, assistant and tool are")
    for name, neutral in _NEUTRAL_OF_MESSAGE.items():
        _require_neutral(getattr(message, name), neutral, f"{place}.{name}")
    calls = tool_calls(message.tool_calls, f"{place}.tool_calls")
    if role == "tool" and not message.tool_call_id:
        raise bad_request(f"{place}.tool_call_id is missing", f"{place}.tool_call_id")
    if role != "tool" and message.tool_call_id is not None:
        raise _not_served(f"{place}.tool_call_id", f"{place}.tool_call_id")
    call_id = message.tool_call_id or ""
    if message.content is None and calls:
        return Message(role, (), calls)
    if message.content is None:
        raise bad_request(f"{place}.content is missing", f"{place}.content")
    if isinstance(message.content, str):
        return Message(role, (TextPart(message.content),), calls, call_id)
    parts = tuple(_part(part, f"{place}.content[{i}]", can_see) for i, part in enumerate(message.content))
    return Message(role, parts, calls, call_id)


def _part(part: _Part, place: str, can_see: bool) -> TextPart | ImagePart:
    if part.type == "image_url" and can_see:
        return _image(part, place)
    if part.type != "text":
        raise _not_served(f"a part of type {part.type!r} ({place})", place, "this model reads text only")
    for name in ("image_url", "input_audio", "file", "refusal"):
        _require_neutral(getattr(part, name), (), f"{place}.{name}")
    if part.text is None:
        raise bad_request(f"{place}.text is missing", f"{place}.text")
    return TextPart(part.text)


def _image(part: _Part, place: str) -> ImagePart:
    for name in ("input_audio", "file", "refusal"):
        _require_neutral(getattr(part, name), (), f"{place}.{name}")
    if part.text is not None:
        raise _not_served(f"{place}.text", f"{place}.text", "text is a part of its own")
    try:
        given = _IMAGE_DECODER.decode(part.image_url)
    except (msgspec.DecodeError, UnicodeError) as error:  # ValidationError is a DecodeError
        raise bad_request(f"{place}.image_url must be an object with a url: {error}", f"{place}.image_url") from None
    if given.detail not in (None, "auto", "low", "high"):
        raise bad_request(f"{place}.image_url.detail must be auto, low or high", f"{place}.image_url.detail")
    return ImagePart(url=given.url)


def _require_neutral(raw: msgspec.Raw, neutral: tuple[str, ...], param: str) -> None:
    if raw is _NULL:  # not given
        return
    value = bytes(raw).translate(None, b" \t\r\n").decode(errors="replace")
    if value != "null" and value not in neutral:
        only = f"leave it out, or send {' or '.join(neutral)}" if neutral else "leave it out"
        raise _not_served(param, param, only)


def _not_served(what: str, param: str | None, remedy: str = "leave it out") -> HttpError:
    return bad_request(f"{what} is not supported: {remedy}", param, "unsupported_parameter")
