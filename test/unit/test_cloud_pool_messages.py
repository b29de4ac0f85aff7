"""Control messages: golden bytes, round trips, limits. A change of bytes needs a new PROTOCOL_VERSION."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from vla_cloud.core.generate import ImageSpan, Priority, SamplingParams
from vla_cloud.core.kv_events import KvChange
from vla_cloud.kv_transfer.layout import KvLayout
from vla_cloud.pools import messages as m
from vla_cloud.pools.codec import (
    MessageError,
    decode_to_gateway,
    decode_to_worker,
    encode,
    pack_tokens,
    unpack_tokens,
)
from vla_cloud.pools.message_parts import MAX_MESSAGE_BYTES, MAX_TOKENS, Message

SAMPLING = SamplingParams(temperature=0.5, seed=2**64 - 1, max_new_tokens=7, stop_token_ids=frozenset([2]))
WORK = m.Work(pack_tokens([1, 2, 70000]), SAMPLING, 5.0, 1, Priority.HIGH, b"salt", [ImageSpan(0, 2, b"i" * 32)])
LAYOUT = KvLayout("m", "ab", layers=2, kv_heads=1, head_dim=4)
TO_WORKER = [
    m.Hello(1, "p0.1"),
    m.Reserve("r", 0, WORK, "p0.1", 30.0),
    m.Prefill("r", 0, WORK, m.Destination("d0.1", "shm:x", "t", 2**60, 1, [3, 4], 2.5)),
    m.Generate("r", 1, WORK),
    m.Abort("r", 1),
    m.WriterDone("r", 1),
    m.LeaseExtend([m.LeaseRow("r", 1), m.LeaseRow("s", 0)], 20.0),
    m.ContextBatch(3, [m.ContextRow(pack_tokens([2, 7]), b"\xff\xd8jpeg"), m.ContextRow(pack_tokens([2]), b"")]),
    m.KvSnapshot(),
    m.Ping(9),
    m.Drain(),
    m.Shutdown(),
]
TO_GATEWAY = [
    m.Join("p0.1", "secret", 17),
    m.Ready(1, "p0.1", "both", 17, 2**60, "", LAYOUT, 64, 512, 997, 32, 256, [2]),
    m.Reserved("r", 0, "t", 1, [3, 4], 16),
    m.Refused("r", 0, "RESOURCE_EXHAUSTED", "full", 0.5),
    m.Prefilled("r", 0, 16, 4096),
    m.PushFailed("r", 0, "UNAVAILABLE", "gone"),
    m.Tokens([m.TokenRow("r", 0, 3, [5]), m.TokenRow("s", 1, 9, [6, 7], [-0.5, -1.0], [[(6, -0.5)], [(7, -1.0)]])]),
    m.Finished("r", 0, "stop", 4, 16, 1),
    m.Aborted("r", 0),
    m.Error("INTERNAL", "broke", "r", 0, True),
    m.KvEvents(5, [m.KvEventRow(KvChange.STORED, b"h" * 32, b"p" * 32), m.KvEventRow(KvChange.CLEARED)]),
    m.LaneReady(2, "robots0.1", 17, "tabletop", b"h" * 32, 16, 128),
    m.Contexts(3, [m.ContextAnswer(b"\0" * 8, 9, True), m.ContextAnswer(b"", 0, False, "malformed_image", "no")], 0.5),
    m.Pong(9, m.Load(64, 60, 1, 100, 2, 3, 20, 1, 0, 1, 2, 1, 5, 1, 4096, 512, 7, 2**33, 1.5, {"peer_dead": 2})),
    m.Drained(),
]
GOLDEN = {
    "Hello": "af34f1e475a537ac",
    "Reserve": "3cb7a65a64dcf9bc",
    "Prefill": "5f113ef3c79dc9f9",
    "Generate": "cf3a6d3675c37495",
    "Abort": "952698fac41c1e0e",
    "WriterDone": "19e9a0460a72d762",
    "LeaseExtend": "09b247bc45f46312",
    "ContextBatch": "31b7f3e031af8189",
    "KvSnapshot": "fb14443a93c5d7ef",
    "Ping": "64b73ff2764c3db1",
    "Drain": "33870442fe601fed",
    "Shutdown": "e6b1c9a4139c9bad",
    "Join": "73fa3f4d8f4aee48",
    "Ready": "ee77f90fa949a896",
    "Reserved": "02f40ed0ca5e664c",
    "Refused": "85b942b3f455b483",
    "Prefilled": "a119128cb6c9c15b",
    "PushFailed": "03bd1e87dd6c8a4f",
    "Tokens": "b7859587a6599183",
    "Finished": "9ca860c29edba7bc",
    "Aborted": "a6c04bf017bead2b",
    "Error": "7a3aeb2f33d35320",
    "KvEvents": "39ef00c7e93308d0",
    "LaneReady": "9314641c205e36b4",
    "Contexts": "f355f4abaa1fb850",
    "Pong": "b0ae4aa825a39bdc",
    "Drained": "ca42d0b3332596c2",
}


def digest(message: Message) -> str:
    return hashlib.sha256(encode(message)).hexdigest()[:16]


def test_every_message_is_here() -> None:
    kinds = {type(message) for message in [*TO_WORKER, *TO_GATEWAY]}
    assert kinds == set(Message.__subclasses__())


@pytest.mark.parametrize("message", [*TO_WORKER, *TO_GATEWAY], ids=lambda message: type(message).__name__)
def test_golden_bytes(message: Message) -> None:
    assert digest(message) == GOLDEN[type(message).__name__], "bytes changed: raise PROTOCOL_VERSION"


def test_golden_bytes_in_full() -> None:
    assert encode(m.Tokens([m.TokenRow("r", 0, 3, [5])])).hex() == "82a474797065a6746f6b656e73a4726f7773919" "6a172000391059090"


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda message: type(message).__name__)
def test_to_worker_and_back(message: Message) -> None:
    assert decode_to_worker(encode(message)) == message
    with pytest.raises(MessageError):
        decode_to_gateway(encode(message))


@pytest.mark.parametrize("message", TO_GATEWAY, ids=lambda message: type(message).__name__)
def test_to_gateway_and_back(message: Message) -> None:
    assert decode_to_gateway(encode(message)) == message
    with pytest.raises(MessageError):
        decode_to_worker(encode(message))


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "abort", "request_id": "", "attempt": 0},
        {"type": "abort", "request_id": "r" * 129, "attempt": 0},
        {"type": "abort", "request_id": "r", "attempt": -1},
        {"type": "abort", "request_id": "r", "attempt": 2**31},
        {"type": "abort", "request_id": "r", "attempt": 0, "more": 1},
        {"type": "abort", "request_id": "r"},
        {"type": "aborted_", "request_id": "r", "attempt": 0},
        {"request_id": "r", "attempt": 0},
        {"type": "lease_extend", "leases": [], "lease_s": float("nan")},
        {"type": "lease_extend", "leases": [], "lease_s": -1.0},
        {"type": "lease_extend", "leases": [], "lease_s": 1e9},
        [1, 2],
        None,
    ],
)
def test_what_is_no_message_is_refused(wrong: object) -> None:
    with pytest.raises(MessageError, match=f"protocol version {m.PROTOCOL_VERSION}"):
        decode_to_worker(msgspec.msgpack.encode(wrong))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(MessageError):
        decode_to_worker(b"\x91" * 100_000 + b"\x00")


def test_sizes_are_bounded() -> None:
    with pytest.raises(MessageError, match="at most"):
        encode(m.Error("INTERNAL", "x" * (MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(MessageError, match="at most"):
        decode_to_worker(bytes(MAX_MESSAGE_BYTES + 1))
    longest = m.Generate("r", 0, m.Work(bytes(4 * MAX_TOKENS), SAMPLING, 1.0))
    assert decode_to_worker(encode(longest)) == longest


def test_token_ids() -> None:
    assert pack_tokens([1, 256, 2**31 - 1]) == b"\x01\0\0\0\0\x01\0\0\xff\xff\xff\x7f"
    assert unpack_tokens(pack_tokens([0, 5, 2**31 - 1])) == [0, 5, 2**31 - 1]
    assert unpack_tokens(b"") == []
    with pytest.raises(OverflowError):
        pack_tokens([2**31])
    with pytest.raises(MessageError, match="4-byte"):
        unpack_tokens(b"\0\0\0")
    with pytest.raises(MessageError, match="negative"):
        unpack_tokens(b"\xff\xff\xff\xff")
