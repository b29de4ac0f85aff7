"""Between the messages of vla_chat.proto and the chat layer's types."""

from __future__ import annotations

import uuid
from typing import Any

from vla_cloud.core.client import Client
from vla_cloud.core.generate import InvalidRequest, Priority
from vla_cloud.gateway.chat_types import (
    AnswerEvent,
    ChatLimits,
    ChatRequest,
    Done,
    ImagePart,
    Message,
    TextDelta,
    TextPart,
    TokenLogprob,
    ToolCallDelta,
)
from vla_cloud.gateway.grpc_structured import tool_calls, wishes
from vla_cloud.gateway.proto import vla_chat_pb2 as pb

_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: None,
    pb.PRIORITY_HIGH: Priority.HIGH,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_LOW: Priority.LOW,
}
_REASONS = {
    "stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH, "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}  # fmt: skip


def check_size(message: pb.GenerateRequest, limits: ChatLimits) -> None:
    """Refuse what would take long to convert, before it is: four million bytes hold two million empty messages.

    Raises:
        InvalidRequest: too many messages or parts.
    """
    if len(message.messages) > limits.max_messages:
        told = f"a conversation has 1 to {limits.max_messages} messages, got {len(message.messages)}"
        raise InvalidRequest(told)
    parts = sum(len(one.parts) for one in message.messages)
    if parts > limits.max_parts:
        raise InvalidRequest(f"the messages have {parts} parts, at most {limits.max_parts} are taken")


def chat_request(
    message: pb.GenerateRequest, deadline_ns: int | None, client: Client | None = None
) -> ChatRequest:  # fmt: skip
    """What was asked, and by whom; an empty request id is replaced by a random one.

    Raises:
        InvalidRequest: a part without content, or a priority that this server does not know.
    """
    if message.priority not in _PRIORITIES:
        raise InvalidRequest(f"priority {message.priority} is not known: use high, normal or low")
    sampling = message.sampling
    grammar, tools = wishes(message)
    return ChatRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        messages=tuple(_message(index, one) for index, one in enumerate(message.messages)),
        model=message.model,
        max_tokens=_or_none(sampling, "max_tokens"),
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        seed=_or_none(sampling, "seed"),
        stop=tuple(sampling.stop),
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        priority=_PRIORITIES[message.priority],
        deadline_ns=deadline_ns,
        session=message.session,
        client=client,
        grammar=grammar,
        tools=tools,
    )


def delta(event: TextDelta) -> pb.Delta:
    """Text, tokens and their log-probabilities."""
    return pb.Delta(text=event.text, tokens=event.tokens, logprobs=[logprob(one) for one in event.logprobs])


def chunk(event: AnswerEvent, request_id: str) -> pb.GenerateChunk:
    """An event of the stream."""
    if isinstance(event, TextDelta):
        return pb.GenerateChunk(delta=delta(event))
    if isinstance(event, ToolCallDelta):
        return pb.GenerateChunk(tool_call=tool_call_delta(event))
    return pb.GenerateChunk(done=done(event, request_id))


def done(event: Done, request_id: str) -> pb.Done:
    """The end."""
    usage = event.usage
    return pb.Done(
        finish_reason=_REASONS[event.finish_reason], stop_string=event.stop_string, request_id=request_id,
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
    )  # fmt: skip


def tool_call_delta(event: ToolCallDelta) -> pb.ToolCallDelta:
    """More of a call."""
    return pb.ToolCallDelta(
        index=event.index, id=event.call_id, name=event.name, arguments=event.arguments, tokens=event.tokens,
        logprobs=[logprob(one) for one in event.logprobs],
    )  # fmt: skip


def add_call(result: pb.GenerateResponse, event: ToolCallDelta) -> None:
    """Put more of a call where it belongs in a whole answer."""
    if event.index == len(result.tool_calls):
        result.tool_calls.add(id=event.call_id, name=event.name)
    result.tool_calls[event.index].arguments += event.arguments


def logprob(one: TokenLogprob) -> pb.TokenLogprob:
    """A token, its log-probability, and the likeliest ones in its place."""
    top = [pb.TopLogprob(token=token, text=text, logprob=value) for token, text, value in one.top]
    return pb.TokenLogprob(token=one.token, text=one.text, logprob=one.logprob, top=top)


def model_status(name: str, health: dict[str, Any]) -> pb.ModelStatus:
    """``health`` as ServingService gives it."""
    known = {"serving", "draining", "active", "queued", "unsettled", "workers"}
    counters = {key: value for key, value in health.items() if key not in known and isinstance(value, int)}
    return pb.ModelStatus(
        name=name, is_serving=health["serving"], is_draining=health["draining"], active=health["active"],
        queued=health["queued"], unsettled=health["unsettled"], counters=counters,
        workers=[_worker(worker) for worker in health["workers"]],
    )  # fmt: skip


def _worker(info: dict[str, Any]) -> pb.Worker:
    load = info["load"] or {}
    names = ("running", "waiting", "free_blocks", "total_blocks", "quarantined_blocks")
    return pb.Worker(
        name=info["name"], role=info["role"], state=info["state"], pid=info["pid"], restarts=info["restarts"],
        **{name: load.get(name, 0) for name in names},
    )  # fmt: skip


def _message(index: int, message: pb.Message) -> Message:
    parts = tuple(_part(index, part) for part in message.parts)
    return Message(message.role, parts, tool_calls(index, message.tool_calls), message.tool_call_id)


def _part(index: int, part: pb.Part) -> TextPart | ImagePart:
    kind = part.WhichOneof("part")
    if kind == "text":
        return TextPart(part.text)
    if kind == "image":
        return ImagePart(part.image.data, part.image.media_type, part.image.url)
    raise InvalidRequest(f"message {index} has a part that is neither text nor image")


def _or_none(sampling: pb.Sampling, name: str) -> int | None:
    return getattr(sampling, name) if sampling.HasField(name) else None
