import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from vla_common import messages, tensors, wire
from vla_common.topics import TOPICS

JOINTS = [*(f"panda_joint{number}" for number in range(1, 8)), "gripper"]


def context(**fields):
    tokens = np.arange(6, dtype=np.float32).reshape(2, 3)
    return messages.new("ContextTokens", session="s", **{**tensors.token_fields(tokens), **fields})


def resealed(payload: bytes) -> bytes:
    return payload[:-4] + struct.pack("<I", zlib.crc32(payload[:-4]))


@pytest.mark.parametrize("name", sorted(messages.MAX_BYTES))
def test_defaults_round_trip(name):
    payload = wire.encode(messages.new(name))
    assert wire.encode(wire.decode(name, payload)) == payload


def test_checksum_is_the_last_four_bytes_over_all_before():
    message = context()
    payload = wire.encode(message)
    assert int.from_bytes(payload[-4:], "little") == zlib.crc32(payload[:-4]) == message.crc32
    assert message.wire_version == wire.WIRE_VERSION


def test_decode_names_the_fault():
    payload = wire.encode(context())
    with pytest.raises(wire.Truncated):
        wire.decode("ContextTokens", payload[: len(payload) // 2])
    with pytest.raises(wire.Truncated):
        wire.decode("ContextTokens", b"\x00\x01")
    with pytest.raises(wire.Oversized):
        wire.decode("ContextTokens", payload, max_bytes=len(payload) - 1)
    with pytest.raises(wire.Oversized):
        wire.decode("ShieldCommand", bytes(messages.MAX_BYTES["vla_runtime/msg/ShieldCommand"] + 1))
    with pytest.raises(wire.ChecksumMismatch):
        wire.decode("ContextTokens", payload[:-1] + bytes([payload[-1] ^ 1]))
    with pytest.raises(wire.Malformed, match="encapsulation"):
        wire.decode("ContextTokens", b"\x00\x00" + payload[2:])  # big-endian
    with pytest.raises(wire.Malformed, match="after the content"):
        wire.decode("ContextTokens", resealed(payload[:-4] + bytes(12)))
    with pytest.raises(wire.ChecksumMismatch, match="after the content"):
        wire.decode("ContextTokens", payload + b"\x01" * 4)
    with pytest.raises(wire.WireError):
        wire.decode("ActionChunk", payload)  # another type


def test_wrong_version_is_told_before_the_layout_is_read():
    payload = bytearray(wire.encode(context()))
    at = 4 + 8 + 4 + 1 + 1  # encapsulation, stamp, empty frame_id with its terminator, padding
    assert payload[at : at + 2] == wire.WIRE_VERSION.to_bytes(2, "little")
    payload[at] += 1
    later = bytes(payload[: at + 2]) + b"another layout" + bytes(4)
    with pytest.raises(wire.WrongVersion, match=f"version {wire.WIRE_VERSION + 1}"):
        wire.decode("ContextTokens", resealed(later))


def test_causes_are_distinct_names_for_counters():
    causes = [cls.cause for cls in wire.WireError.__subclasses__()]
    assert sorted(causes) == ["checksum_mismatch", "malformed", "oversized", "truncated", "wrong_version"]


def test_unknown_type_names_the_nearest():
    with pytest.raises(KeyError, match="ContextTokens"):
        wire.decode("ContextToken", b"")


def test_bytes_that_ros_leaves_after_the_last_field_are_accepted():
    """4 for each empty array of doubles and up to 3 more; real robots send them."""
    payload = wire.encode(messages.new("JointState", name=JOINTS, position=np.zeros(8), velocity=np.zeros(8)))
    message = wire.decode("JointState", payload + bytes(15))
    assert message.name == JOINTS and message.effort.size == 0
    with pytest.raises(wire.Malformed, match="after the content"):
        wire.decode("JointState", payload + bytes(16))


def test_padding_is_not_covered_by_the_checksum():
    payload = bytearray(wire.encode(context()))
    assert payload[17] == 0  # after the empty frame_id's terminator
    payload[17] = 0xAB
    assert wire.encode(wire.decode("ContextTokens", payload)) == wire.encode(context())
    payload[16] = 0xAB  # the terminator itself
    with pytest.raises(wire.ChecksumMismatch, match="terminator"):
        wire.decode("ContextTokens", payload)
    payload[15] ^= 0x80  # a length
    with pytest.raises(wire.Truncated):
        wire.decode("ContextTokens", payload)


def test_what_ros_serialises_is_accepted():
    """Bytes made by rclpy, with whatever was in its memory as padding; test/ros makes them anew where ROS is."""
    lines = (Path(__file__).parents[1] / "golden" / "common" / "from_ros.txt").read_text().splitlines()
    assert len(lines) == 2 * len(messages.MAX_BYTES)
    dirty = 0
    for line in lines:
        short, what, text = line.split()
        message = wire.decode(short, bytes.fromhex(text))
        ours = wire.encode(message)
        dirty += ours != bytes.fromhex(text)
        if what == "sample":
            golden = (Path(__file__).parents[1] / "golden" / "common" / f"{short}.hex").read_text()
            assert ours == bytes.fromhex(golden)
    assert dirty > len(lines) / 3


def test_only_an_operators_command_may_come_without_a_checksum():
    """A plain ROS publisher leaves crc32 at 0."""
    payload = wire.encode(messages.new("ShieldCommand", command=2, sequence=1))[:-4] + bytes(4)
    assert wire.decode("ShieldCommand", payload).command == 2
    with pytest.raises(wire.ChecksumMismatch):
        wire.decode("ShieldCommand", payload[:-1] + b"\x01")
    other = bytearray(payload)
    other[18] += 1
    with pytest.raises(wire.WrongVersion):
        wire.decode("ShieldCommand", other)
    for name in sorted(messages.MAX_BYTES):
        if messages.is_own(name) and name != "vla_runtime/msg/ShieldCommand":
            with pytest.raises(wire.ChecksumMismatch):
                wire.decode(name, wire.encode(messages.new(name))[:-4] + bytes(4))


def test_nothing_without_a_checksum_comes_over_the_cloud_link():
    assert {spec.network for spec in TOPICS.values() if spec.type_name in messages.UNCHECKED_IF_ZERO} == {"bus"}


def test_arrays_are_numpy_aligned_and_read_only():
    source = bytearray(wire.encode(messages.new("JointState", position=np.arange(8.0))))
    message = wire.decode("JointState", memoryview(source))
    source[:] = bytes(len(source))
    np.testing.assert_array_equal(message.position, np.arange(8.0))
    assert message.position.flags.aligned and not message.position.flags.writeable


def test_encode_refuses_what_would_go_out_wrong():
    message = messages.new("ActionChunk")
    message.positions = np.zeros(4, dtype=np.float32)
    with pytest.raises(wire.EncodeError, match=r"positions takes a 1-D float64 array, got 1-D float32"):
        wire.encode(message)
    message.positions = [0.0]
    with pytest.raises(wire.EncodeError, match="got list"):
        wire.encode(message)
    message.positions = np.zeros(8)[::2]
    with pytest.raises(wire.EncodeError, match="contiguous"):
        wire.encode(message)
    image = messages.new("CompressedImage")
    image.data = np.zeros(3, dtype=np.int8)
    with pytest.raises(wire.EncodeError, match="CompressedImage.data"):
        wire.encode(messages.new("Observation", images=[image]))
    with pytest.raises(wire.EncodeError, match="limit"):
        wire.encode(context(data=np.zeros(messages.MAX_BYTES["vla_runtime/msg/ContextTokens"], np.uint8)))
    status = messages.new("ShieldCommand", command=300)
    with pytest.raises(wire.EncodeError):
        wire.encode(status)
    chunk = messages.new("ActionChunk", session=3)
    with pytest.raises(wire.EncodeError):
        wire.encode(chunk)


def test_header_stamps():
    header = wire.make_header(1_234_567_890_123, "base")
    assert (header.stamp.sec, header.stamp.nanosec, header.frame_id) == (1234, 567_890_123, "base")
    assert wire.stamp_ns(header) == 1_234_567_890_123
    for bad in (-1, 2**31 * 10**9):
        with pytest.raises(ValueError, match="does not fit"):
            wire.make_header(bad)


def test_instruction_hash_ignores_case_and_spacing():
    first = wire.instruction_hash("Touch  the RED\tblock ")
    assert first.dtype == np.uint8 and first.shape == (32,)
    np.testing.assert_array_equal(first, wire.instruction_hash("touch the red block"))
    assert (first != wire.instruction_hash("touch the blue block")).any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tokens_round_trip(dtype):
    tokens = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    message = messages.new("ContextTokens", **tensors.token_fields(tokens, dtype))
    received = tensors.tokens_of(wire.decode("ContextTokens", wire.encode(message)))
    assert received.dtype == np.float32 and received.shape == (3, 4)
    np.testing.assert_allclose(received, tokens, atol=0 if dtype == "float32" else 2e-3)


def test_tokens_that_lie_are_refused():
    with pytest.raises(ValueError):
        tensors.token_fields(np.zeros(3))
    for fields, match in (
        ({"num_tokens": 3}, "are not 3 x 3"),
        ({"num_tokens": 2**32 - 1, "dim": 2**32 - 1}, "are not"),
        ({"dtype": "float64"}, "dtype"),
        ({"data": np.full(6, np.nan, np.float32).tobytes()}, "finite"),
    ):
        with pytest.raises(wire.Malformed, match=match):
            tensors.tokens_of(context(**fields))


def test_chunk_positions_have_their_shape():
    chunk = messages.new("ActionChunk", joint_names=JOINTS, horizon=2, positions=np.arange(16.0).reshape(2, 8))
    assert tensors.positions_of(chunk)[1, 0] == 8.0
    chunk.horizon = 3
    with pytest.raises(wire.Malformed, match="3 x 8"):
        tensors.positions_of(chunk)
