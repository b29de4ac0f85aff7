"""Bytes that are nearly or not at all messages: refused by MessageError, never anything else."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_cloud.core.generate import SamplingParams
from vla_cloud.pools import messages as m
from vla_cloud.pools.codec import MessageError, decode_to_gateway, decode_to_worker, encode, pack_tokens
from vla_cloud.pools.message_parts import Message

SEEDS = [
    encode(m.Generate("r", 1, m.Work(pack_tokens(range(40)), SamplingParams(seed=3), 5.0))),
    encode(m.Prefill("r", 0, m.Work(b"", SamplingParams(), 1.0), m.Destination("d", "a", "t", 1, 0, [1, 2], 1.0))),
    encode(m.Tokens([m.TokenRow("r", 0, 3, [5], [-0.5], [[(5, -0.5)]])] * 3)),
    encode(m.Finished("r", 0, "stop", 4, 16, 1)),
]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
tags = st.sampled_from([kind.__struct_config__.tag for kind in Message.__subclasses__()])
fields = st.sampled_from(["request_id", "attempt", "work", "rows", "leases", "worker", "code", "message", "layout", "load"])


def decode_both(data: bytes) -> None:
    for decode in (decode_to_worker, decode_to_gateway):
        try:
            message = decode(data)
        except MessageError:
            continue
        assert isinstance(message, Message)
        assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    decode_both(data)


@settings(max_examples=500)
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), st.integers(0, 400))
def test_damaged_messages(seed: bytes, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(seed)
    for at, value in changes:
        data[at % len(data)] = value
    decode_both(bytes(data))
    decode_both(bytes(data[: cut % len(data)]))


@given(tags, st.dictionaries(fields, values, max_size=6))
def test_wrong_values_under_right_names(tag: str, content: dict[str, object]) -> None:
    decode_both(msgspec.msgpack.encode({"type": tag, **content}))
