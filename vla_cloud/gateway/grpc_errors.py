"""Who calls over gRPC, and how a call ends with an error: a status, and when it is worth another try."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from vla_cloud.core.client import Client, Unauthenticated
from vla_cloud.core.generate import RequestError
from vla_cloud.gateway.chat import Chat, retry_after_s

MAX_DETAIL_CHARS = 1000
"""Of an error's text: it may quote what a client sent, and travels in a header."""

_CLOSE_S = 1.0


def client_of(context: grpc.aio.ServicerContext, chat: Chat) -> Client:
    """Who calls, by the metadata ``authorization``; where no keys are asked for, everybody is the same.

    Raises:
        Unauthenticated: nobody knows.
    """
    given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    if len(given) > 1:
        raise Unauthenticated("authorization was sent more than once", "malformed")
    value = given[0] if given else None
    return chat.clients.identify(value.decode("latin-1") if isinstance(value, bytes) else value)


async def end_with(context: grpc.aio.ServicerContext, error: RequestError) -> NoReturn:
    """End the call with the error's code and text.

    Where waiting helps, the delay goes along as google.rpc.RetryInfo in the status details, as ``retry-after-ms``, and
    as ``grpc-retry-pushback-ms``, which clients with a retry policy heed by themselves (gRFC A6).
    """
    text = str(error)[:MAX_DETAIL_CHARS]
    code = grpc.StatusCode[error.code]
    delay_s = retry_after_s(error)
    if delay_s is None:
        await _abort(context, code, text, ())
    delay_ms = max(1, round(delay_s * 1000))
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(delay_ms)
    packed = any_pb2.Any()
    packed.Pack(info)
    status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=text, details=[packed]))
    delay = (("retry-after-ms", str(delay_ms)), ("grpc-retry-pushback-ms", str(delay_ms)))
    await _abort(context, code, text, (*status.trailing_metadata, *delay))


async def _abort(
    context: grpc.aio.ServicerContext, code: grpc.StatusCode, text: str, trailers: tuple[tuple[str, str | bytes], ...]
) -> NoReturn:
    """The status of a client that does not read waits behind what it has not read: not for it, though, do we wait."""
    try:
        await asyncio.wait_for(context.abort(code, text, trailers), _CLOSE_S)
    except (asyncio.TimeoutError, grpc.aio.InternalError):  # the latter: it has gone
        pass
    raise asyncio.CancelledError
