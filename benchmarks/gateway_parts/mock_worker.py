"""An inference server without a model, for routers: OpenAI's chat completions over HTTP/1.1, nothing else worth a word.

Prints its port. Does per request and chunk what a server cannot leave out, and is not meant to meet anything but this
benchmark: no limits, no errors. A paced answer gets one chunk at each step of the imagined engine, as all others here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from gateway_parts.stamps import next_tick_s, stamp
from vla_common.process import end_with_parent

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CHUNK = (
    b'data: {"id":"chatcmpl-%032d","created":1700000000,"model":"bench","object":"chat.completion.chunk","choices":'
    b'[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
)
WHOLE = (
    b'{"id":"chatcmpl-%032d","created":1700000000,"model":"bench","object":"chat.completion","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"%b","refusal":null},"logprobs":null,"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":64,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":null}}'
)
PAGES = {
    "/health": {"status": "ok"},
    "/v1/models": {"object": "list", "data": [{"id": "bench", "object": "model", "owned_by": "bench"}]},
    "/model_info": {"is_generation": True},
    "/server_info": {"served_model_name": "bench", "dp_size": 1, "version": "0"},
    "/version": {"version": "0"},
}


class Engine:
    """Steps of each pace, and who waits for the next."""

    def __init__(self, phase: float) -> None:
        self._phase = phase
        self._waiting: dict[float, set[Connection]] = {}

    def join(self, connection: Connection, period_s: float) -> None:
        """It gets a token at each step until it is told to stop."""
        others = self._waiting.get(period_s)
        if others is None:
            self._waiting[period_s] = {connection}
            self._later(period_s)
        else:
            others.add(connection)

    def _later(self, period_s: float) -> None:
        delay_s = next_tick_s(period_s, self._phase, time.monotonic())
        asyncio.get_running_loop().call_later(delay_s, self._step, period_s)

    def _step(self, period_s: float) -> None:
        present = self._waiting[period_s]
        present -= {connection for connection in present if not connection.token()}
        if present:
            self._later(period_s)
        else:
            del self._waiting[period_s]


class Connection(asyncio.Protocol):
    """One request after the other."""

    count = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""
        self._left = 0
        self._id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) > 0:
            head = self._buffer[:end].lower()
            length = 0
            if (at := head.find(b"\r\ncontent-length:")) >= 0:
                length = int(head[at + 17 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            path = head.split(b" ", 2)[1].decode()
            if path == "*":  # asks for HTTP/2
                self._transport.close()
                return
            elif path == "/v1/chat/completions":
                self._chat(json.loads(body))
            else:
                page = json.dumps(PAGES.get(path.partition("?")[0].replace("/get_", "/"), {})).encode()
                self._transport.write(HEAD % (len(page), page))

    def _chat(self, asked: dict[str, object]) -> None:
        Connection.count += 1
        # A router may write the request anew, with the newer name of the field.
        self._id, count = Connection.count, int(str(asked.get("max_tokens") or asked.get("max_completion_tokens") or 1))
        if not asked.get("stream"):
            text = b"".join(b" %d" % stamp() for _ in range(count))
            body = WHOLE % (self._id, text, count, 64 + count)
            self._transport.write(HEAD % (len(body), body))
            return
        self._left = count
        self._transport.write(STREAM + framed(CHUNK % (self._id, b'{"role":"assistant","content":""}', b"null")))
        if period_ms := int(str(asked.get("seed", 0))):
            self._engine.join(self, period_ms / 1000)
            return
        while self.token():
            pass

    def token(self) -> bool:
        """Write one; False after the last."""
        if self._left <= 0:
            return False
        self._left -= 1
        data = framed(CHUNK % (self._id, b'{"content":" %d"}' % stamp(), b"null"))
        if not self._left:
            end = CHUNK % (self._id, b"{}", b'"length"')
            data += framed(end + b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._transport.write(data)
        return self._left > 0


def framed(data: bytes) -> bytes:
    """A chunk of HTTP/1.1's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(phase: float) -> None:
    engine = Engine(phase)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    end_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", type=float, default=0.0)
    asyncio.run(serve(parser.parse_args().phase))
