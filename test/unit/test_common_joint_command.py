import struct

import numpy as np
import pytest

from vla_common import messages, wire
from vla_common.joint_command import JointCommandTemplate

JOINTS = [*(f"panda_joint{number}" for number in range(1, 8)), "gripper"]


@pytest.mark.parametrize("names", [JOINTS, ["a"], ["ab", "c"], ["abc"] * 3, ["abcd", "e"], ["ü"]])
@pytest.mark.parametrize("frame_id", ["", "b", "base"])
def test_equals_full_serialisation(names, frame_id):
    rng = np.random.default_rng(len(names))
    template = JointCommandTemplate(names, frame_id)
    for stamp_ns in (0, 999_999_999, 1_000_000_000, 12_345_678_901_234):
        position, velocity = rng.normal(size=len(names)), rng.normal(size=len(names))
        message = messages.new(
            "JointState", header=wire.make_header(stamp_ns, frame_id), name=names, position=position, velocity=velocity
        )
        assert template.pack(stamp_ns, position, velocity) == wire.encode(message)


def test_earlier_payloads_do_not_change():
    template = JointCommandTemplate(JOINTS)
    first = template.pack(1, np.zeros(8), np.zeros(8))
    template.pack(2, np.ones(8), np.ones(8))
    assert wire.decode("JointState", first).position.sum() == 0


def test_refuses_wrong_width_and_no_names():
    template = JointCommandTemplate(JOINTS)
    with pytest.raises(struct.error):
        template.pack(0, np.zeros(7), np.zeros(8))
    with pytest.raises(ValueError):
        JointCommandTemplate([])
