import re

import pytest

from vla_common import messages, topics
from vla_common.topics import ANY_ROBOT, TOPICS, Attachment, NodeId

# Published by the ROS 2 project for the stock types: keys and tokens must contain exactly these.
STRING_HASH = "RIHS01_df668c740482bbd48fb39d76a70dfd4bd59db1288021743503259e948f6b1a18"


def test_table_agrees_with_the_architecture_document(request):
    text = (request.config.rootpath / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (/\S+) \| (\w+/\w+)[^|]*\|[^|]*\| (bus|cloud) \|", text, re.MULTILINE)
    table = {name: (pattern, kind, network) for name, pattern, kind, network in rows}
    assert set(table) == set(TOPICS)
    for name, spec in TOPICS.items():
        pattern = spec.pattern.replace("{robot}", "<r>").replace("{camera}", "<camera>")
        assert table[name] == (pattern, spec.type_name.replace("/msg/", "/"), spec.network), name


def test_every_spec_is_complete():
    for name, spec in TOPICS.items():
        assert spec.name == name and spec.max_age_s > 0 and spec.rate_hz >= 0 and spec.depth >= 1
        assert spec.max_bytes == messages.MAX_BYTES[spec.type_name]


def test_topic_names():
    assert TOPICS["image"].topic("panda", "wrist") == "/panda/wrist/image_raw/compressed"
    for robot in ("", "a/b", "a b", "*x", "**", "$", "ü"):
        with pytest.raises(ValueError, match="robot id"):
            TOPICS["context"].topic(robot)
    with pytest.raises(ValueError, match="camera id"):
        TOPICS["image"].topic("panda")
    with pytest.raises(KeyError, match="context"):
        topics.topic_spec("contexts")


def test_data_key_layout():
    assert topics.data_key("/chatter", "std_msgs/String") == f"0/chatter/std_msgs::msg::dds_::String_/{STRING_HASH}"
    key = topics.data_key(TOPICS["context"].topic("panda"), "ContextTokens", domain=7)
    assert key.startswith("7/vla/panda/context/vla_runtime::msg::dds_::ContextTokens_/RIHS01_")


def test_robot_of_key():
    spec = TOPICS["observation"]
    key = topics.data_key(spec.topic("arm_2"), spec.type_name)
    assert topics.robot_of(spec, key) == "arm_2"
    assert spec.topic(ANY_ROBOT) == "/vla/*/observation"
    for bad in ("0", "0/vla", topics.data_key(spec.topic(ANY_ROBOT), spec.type_name)):
        with pytest.raises(ValueError):
            topics.robot_of(spec, bad)


def test_attachment_with_and_without_length_byte():
    gid = bytes(range(16))
    packed = topics.pack_attachment(5, -7, gid)
    assert len(packed) == 33 and packed[16] == 16
    expected = Attachment(5, -7, gid)
    assert topics.unpack_attachment(packed) == expected
    assert topics.unpack_attachment(packed[:16] + packed[17:]) == expected
    for bad in (b"", packed[:-2], packed + b"x", packed[:16] + b"\x0f" + packed[17:]):
        assert topics.unpack_attachment(bad) is None


def test_liveliness_tokens():
    """Layout of rmw_zenoh: see its liveliness_utils.cpp; '%' stands for '/'."""
    node = NodeId("abc123", "talker")
    assert topics.node_token(node) == "@ros2_lv/0/abc123/0/0/NN/%/%/talker"
    token = topics.endpoint_token(node, 10, "MP", "/chatter", "String", "reliable", 7)
    assert token == (
        f"@ros2_lv/0/abc123/0/10/MP/%/%/talker/%chatter/std_msgs::msg::dds_::String_/{STRING_HASH}/::,7:,:,:,,"
    )
    sub = topics.endpoint_token(NodeId("z", "n", "/ns", 3), 1, "MS", "/a/b", "String", "best_effort", 42)
    assert sub.startswith("@ros2_lv/3/z/0/1/MS/%/%ns/n/%a%b/") and sub.endswith("/2::,:,:,:,,")


def test_gid_is_xxh3_128_low_half_first():
    xxhash = pytest.importorskip("xxhash")
    gid = topics.token_gid("token")
    digest = xxhash.xxh3_128(b"token").digest()  # canonical: high half first, big-endian
    assert gid == digest[8:][::-1] + digest[:8][::-1]
