"""Messages that are almost right, from a seed and a corpus of right ones: for HTTP, HTTP/2 with gRPC, and observations."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Sequence

TOKENS = (b"\r\n", b"\x00", b"\xff", b"{", b"[", b'"', b":", b"9", b"-1", b"\r", b"\n", b" ", b"%00", b"\xed\xa0\x80", b"\xc0\x80")
VALUES = (
    None, True, 0, 1, -1, 2**31, 2**63, 2**70, 1.5, 1e308, "", "x", "chain", "user", "\u0000", "\ud800", "日本", [], [1], {},
    {"type": "text"}, [None], [[[]]], {"a": {"b": {}}}, "data:image/png;base64,AAAA", "http://127.0.0.1:1/x",
)  # fmt: skip
FIELDS = (
    "model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs",
    "top_logprobs", "n", "tools", "response_format", "metadata", "user", "logit_bias", "unknown", "max_completion_tokens",
    "repetition_penalty", "functions", "tool_choice", "modalities", "store", "service_tier", "presence_penalty",
)  # fmt: skip


def damaged(rng: random.Random, data: bytes, most: int = 5) -> bytes:
    """The bytes with some inserted, cut, replaced, flipped or repeated."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, most + 1)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0:
                changed[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 1:
                del changed[at : at + rng.randrange(1, 20)]
            case 2:
                changed[at : at + 1] = rng.choice(TOKENS)
            case 3:
                changed[at:at] = changed[at : at + rng.randrange(1, 30)]
            case 4 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case _:
                del changed[at:]
    return bytes(changed)


# HTTP


def body(rng: random.Random, base: dict[str, object]) -> bytes:
    """JSON of a chat request; one in eight is right."""
    fields = dict(base)
    how = rng.randrange(8)
    if how in (1, 2, 3):
        for _ in range(rng.randrange(1, 3)):
            fields[rng.choice(FIELDS)] = rng.choice(VALUES)
    elif how == 4:
        keys = ("role", "content", "name", "tool_calls", "x")
        fields["messages"] = [{rng.choice(keys): rng.choice(VALUES) for _ in range(3)} for _ in range(rng.randrange(3))]
    elif how == 5:
        kinds = ("text", "image_url", "input_audio", "file", "x", None)
        parts = [{"type": rng.choice(kinds), rng.choice(("text", "image_url", "y")): rng.choice(VALUES)} for _ in range(2)]
        fields["messages"] = [{"role": "user", "content": parts}]
    data = json.dumps(fields).encode()
    return data if how < 6 else damaged(rng, data) if how == 6 else rng.randbytes(rng.randrange(100))


def request(data: bytes, *headers: bytes, line: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    """A request whose head is right."""
    lines = [line, b"Host: 127.0.0.1", b"Content-Type: application/json", b"Content-Length: %d" % len(data), *headers]
    return b"\r\n".join([*lines, b"", b""]) + data


def chunked(rng: random.Random, data: bytes) -> bytes:
    """The body in chunks, with extensions, trailers and, perhaps, something wrong."""
    out, at = b"", 0
    while at < len(data):
        size = rng.choice((1, 3, 16, 100, len(data)))
        piece = data[at : at + size]
        told = rng.choice((b"%x", b"%x", b"%x", b"%X;a=b", b"0%x", b"0x%x", b"-%x", b"%x ")) % len(piece)
        out, at = out + told + b"\r\n" + piece + rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"")), at + size
    end = rng.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nx-trailer: y\r\n\r\n", b"", b"zz\r\n", b"ffffffffffffffffff\r\n"))
    return out + end


def smuggled(rng: random.Random, data: bytes) -> bytes:
    """A request whose end two readers may see at two places."""
    size = b"%d" % len(data)
    inner = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    framing = rng.choice((
        b"Content-Length: " + size + b"\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3",
        b"Content-Length: " + size + b"\r\nContent-Length: 0",
        b"Content-Length: " + size + b", 0",
        b"Content-Length: +" + size,
        b"Content-Length: 0x10",
        b"Content-Length : " + size,
        b"Content-Length:\x0b" + size,
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: cow",
        b"X: y\r\n Transfer-Encoding: chunked",
    ))  # fmt: skip
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    rest = data if rng.random() < 0.3 else chunked(rng, data)
    return head + framing + b"\r\n\r\n" + rest + (inner if rng.random() < 0.5 else b"")


def flooded(rng: random.Random) -> bytes:
    """A head with very many, very long, repeated or empty fields."""
    line = rng.choice((b"x: y\r\n", b"x:\r\n", b"Host: a\r\n", b"Cookie: " + b"z" * 500 + b"\r\n", b" folded\r\n", b":\r\n"))
    end = rng.choice((b"\r\n", b"\r\n", b""))
    return b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + line * rng.choice((10, 100, 1000, 12_000)) + end


def http_message(rng: random.Random, base: dict[str, object]) -> bytes:
    """What comes on a connection: a request with something wrong, or several."""
    data = body(rng, base)
    match rng.randrange(10):
        case 0 | 1:
            head, _, rest = request(data).partition(b"\r\n\r\n")
            return damaged(rng, head) + b"\r\n\r\n" + rest
        case 2:
            return damaged(rng, request(data))
        case 3 | 4:
            head = request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            return head + chunked(rng, data)
        case 5 | 6:
            return smuggled(rng, data)
        case 7:
            return flooded(rng) if rng.random() < 0.2 else request(b"", line=rng.choice(LINES))
        case 8:
            return request(data) * rng.randrange(2, 5)
        case _:
            return rng.randbytes(rng.randrange(1, 300))


LINES = (
    b"GET /metrics HTTP/1.1", b"GET /v1/models/%ff%00 HTTP/1.1", b"GET //v1//models HTTP/1.1", b"PRI * HTTP/2.0", b"GET /health HTTP/1.0",
    b"GET /health HTTP/9.9", b"OPTIONS * HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"GET http://x/health HTTP/1.1", b"HEAD /health HTTP/1.1",
    b"DELETE /v1/chat/completions HTTP/1.1", b"GET /../../etc/passwd HTTP/1.1", b"POST /v1/chat/completions?x=%00 HTTP/1.1",
)  # fmt: skip


# HTTP/2: frames of a right session, out of order, repeated, or with something wrong


def frames(rng: random.Random, corpus: Sequence[bytes], most: int) -> list[bytes]:
    """Frames, the first ones perhaps right."""
    out = list(corpus[: rng.randrange(len(corpus) + 1)])
    for _ in range(rng.randrange(1, most)):
        one = rng.choice(corpus)
        match rng.randrange(6):
            case 0:
                one = damaged(rng, one, 2)
            case 1:
                one = one[:3] + bytes((rng.randrange(16), rng.randrange(256))) + one[5:]
            case 2:
                stream = rng.choice((0, 1, 2, 3, 5, 7, 2**31 - 1, 2**32 - 1))
                one = one[:5] + struct.pack(">I", stream) + one[9:]
            case 3:
                one = rng.choice((0, 1, 5, 16_384, 16_385, 2**24 - 1)).to_bytes(3, "big") + one[3:]
            case 4:
                data = rng.randbytes(rng.choice((0, 4, 5, 6, 8, 40, 300)))
                head = bytes((rng.randrange(12), rng.randrange(256))) + struct.pack(">I", rng.choice((0, 1, 3)))
                one = len(data).to_bytes(3, "big") + head + data
        out.append(one)
    return out


# observations


def observation(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """A payload: damaged, of a right checksum although it is damaged, cut, of another type, or nonsense."""
    one = rng.choice(corpus)
    match rng.randrange(6):
        case 0:
            return damaged(rng, one)
        case 1 | 2:
            whole = bytearray(one[:-4])
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(min(len(whole), rng.choice((64, 400, 10**6))))
                whole[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            return bytes(whole) + struct.pack("<I", zlib.crc32(bytes(whole)))
        case 3:
            cut = one[: rng.randrange(len(one))]
            return cut if rng.random() < 0.5 else cut + struct.pack("<I", zlib.crc32(cut))
        case 4:
            return one + rng.randbytes(rng.randrange(1, 40))
        case _:
            return rng.randbytes(rng.randrange(300))
