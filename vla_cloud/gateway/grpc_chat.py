"""The service vla.v1.Chat: calls of the chat layer, and nothing of its own but the transport's limits."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc.aio

from vla_cloud.core.generate import InvalidRequest, QueueFull, RequestError
from vla_cloud.gateway.chat import Chat
from vla_cloud.gateway.chat_types import ChatRequest, Done, TextDelta
from vla_cloud.gateway.grpc_convert import add_call, chat_request, check_size, chunk, done, logprob
from vla_cloud.gateway.grpc_errors import client_of, end_with
from vla_cloud.gateway.metrics import GatewayMetrics
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_common.clock import NS_PER_S, Clock

REQUEST_ID = "request-id"
DOOR = "grpc"


class ChatServicer:
    """Methods have the names of the .proto file. A message that could not be read is None."""

    def __init__(self, chat: Chat, clock: Clock, slow_reader_s: float, metrics: GatewayMetrics) -> None:
        """``slow_reader_s``: a client that takes nothing for so long is given up."""
        self._chat, self._clock, self._slow_reader_s, self._metrics = chat, clock, slow_reader_s, metrics

    async def Generate(
        self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:  # fmt: skip
        """The whole answer. A client that goes away ends it: the call's task is cancelled, the answer closed."""
        result, text = pb.GenerateResponse(), []
        try:
            asked = self._asked(request, context)
            async with aclosing(self._metrics.observed(DOOR, asked, self._chat.stream(asked))) as answer:
                async for event in answer:
                    if isinstance(event, Done):
                        result.done.CopyFrom(done(event, asked.request_id))
                        continue
                    result.tokens.extend(event.tokens)
                    result.logprobs.extend(logprob(one) for one in event.logprobs)
                    if isinstance(event, TextDelta):
                        text.append(event.text)
                    else:
                        add_call(result, event)
        except RequestError as error:
            await end_with(context, error)
        await context.send_initial_metadata(((REQUEST_ID, asked.request_id),))
        result.text = "".join(text)
        return result

    async def GenerateStream(self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext) -> None:
        """The answer as it grows.

        Nothing is sent before the first text, so that an early refusal is one that clients may retry by themselves
        (gRFC A6: initial metadata commits a call).
        """
        has_begun = False
        try:
            asked = self._asked(request, context)
            async with aclosing(self._metrics.observed(DOOR, asked, self._chat.stream(asked))) as answer:
                with _SlowReader(self._slow_reader_s, self._clock) as reader:
                    async for event in answer:
                        if not has_begun:
                            has_begun = True
                            await context.send_initial_metadata(((REQUEST_ID, asked.request_id),))
                        reader.begin()
                        await context.write(chunk(event, asked.request_id))
                        reader.end()
        except RequestError as error:
            await end_with(context, error)
        except grpc.aio.InternalError:  # a write failed: the client has gone, which is told to the task only afterwards
            raise asyncio.CancelledError from None

    async def Abort(self, request: pb.AbortRequest | None, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """End a request of the same tenant, if it is here."""
        try:
            client = client_of(context, self._chat)
            return pb.AbortResponse(was_running=request is not None and self._chat.abort(request.request_id, client))
        except RequestError as error:
            await end_with(context, error)

    async def ListModels(
        self, request: pb.ListModelsRequest | None, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:  # fmt: skip
        """Names, and whether they are served now."""
        try:
            names = self._chat.names_for(client_of(context, self._chat))
        except RequestError as error:
            await end_with(context, error)
        models = [pb.Model(name=name, is_serving=self._chat.is_model_serving(name)) for name in names]
        return pb.ListModelsResponse(models=models)

    def _asked(self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext) -> ChatRequest:
        try:
            client = client_of(context, self._chat)
            if request is None:
                raise InvalidRequest("the message is not a vla.v1.GenerateRequest")
            check_size(request, self._chat.limits)
            left_s = context.time_remaining()
            deadline_ns = None if left_s is None else self._clock.monotonic_ns() + round(left_s * NS_PER_S)
            asked = chat_request(request, deadline_ns, client)
        except RequestError as error:
            self._metrics.ended(DOOR, "refused", error.code)
            raise
        if self._chat.tracing is None:
            return asked
        callers = [str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"]
        return self._chat.tracing.begin(asked, DOOR, callers)


class _SlowReader:
    """Cancels its task while a write waits for longer than is allowed, and makes a RequestError of that.

    A write waits while the client does not take what was sent before (HTTP/2 flow control); meanwhile new tokens
    wait in the service, which bounds their number. One timer for a whole stream costs less than one for each write.
    """

    def __init__(self, limit_s: float, clock: Clock) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._since_ns: int | None = None
        self._is_late = False
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._since_ns = self._clock.monotonic_ns()

    def end(self) -> None:
        self._since_ns = None

    def __enter__(self) -> _SlowReader:
        self._look_again(self._limit_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if kind is asyncio.CancelledError and self._is_late:
            raise QueueFull(f"the client has read nothing for {self._limit_s:g} s: read faster")

    def _look_again(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        waited_s = 0.0 if self._since_ns is None else (self._clock.monotonic_ns() - self._since_ns) / NS_PER_S
        if waited_s < self._limit_s:
            self._look_again(self._limit_s - waited_s)
        elif self._task is not None:
            self._is_late = True
            self._task.cancel()
