"""Where traces of chat requests begin: at the doors."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from vla_cloud.core.generate import RequestError
from vla_cloud.core.request_trace import RequestTrace
from vla_cloud.gateway.chat_types import AnswerEvent, ChatRequest, Done
from vla_common.clock import Clock
from vla_common.tracing import Tracer, parse_traceparent, trace_id


class ChatTracing:
    """Gives requests their traces. Ids: the client's, else one that no other request of any gateway has."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        """``clock``: that of the spans."""
        self._tracer, self._clock = tracer, clock
        self._run, self._numbers = secrets.token_hex(16), itertools.count()

    def begin(
        self, request: ChatRequest, door: str, traceparents: list[str], begin_ns: int | None = None
    ) -> ChatRequest:  # fmt: skip
        """The request, with a trace if this one is recorded.

        Args:
            request: as it was read. door: http or grpc.
            traceparents: the client's headers of that name; they count if there is one and it is well-formed.
            begin_ns: when the request came, if it took time to read.
        """
        caller = parse_traceparent(traceparents[0]) if len(traceparents) == 1 else None
        trace, parent = caller or (trace_id("chat", self._run, next(self._numbers), request.request_id), b"")
        if not self._tracer.samples(trace):
            return request
        now_ns = self._clock.monotonic_ns()
        came_ns = now_ns if begin_ns is None else begin_ns
        made = RequestTrace(self._tracer, trace, parent, came_ns, request_id=request.request_id, door=door)
        if begin_ns is not None:
            made.child("receive", begin_ns, now_ns)
        return replace(request, trace=made)


async def observed(
    trace: RequestTrace, events: AsyncGenerator[AnswerEvent, None], clock: Clock
) -> AsyncGenerator[AnswerEvent, None]:
    """The same answer; its end ends the trace."""
    is_done = False
    try:
        async with aclosing(events) as answer:
            async for event in answer:
                if isinstance(event, Done):
                    is_done = True
                    trace.note(
                        prompt_tokens=event.usage.prompt_tokens, tokens=event.usage.completion_tokens,
                        reason=event.finish_reason,
                    )  # fmt: skip
                yield event
    except RequestError as error:
        trace.fail(f"{error.code}: {error}")
        raise
    except (GeneratorExit, asyncio.CancelledError):
        if not is_done:
            trace.fail("CANCELLED: the client left")
        raise
    except Exception as error:
        trace.fail(f"INTERNAL: {type(error).__name__}")
        raise
    finally:
        trace.end(clock.monotonic_ns())
