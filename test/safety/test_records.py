"""Layouts of the shared memory, and chunks that pass through it."""

import numpy as np
import pytest

from vla_edge.core.chunk import REJECTS, ActionChunk
from vla_edge.core.records import (
    MAX_HORIZON,
    NAME_BYTES,
    TICK_LOG,
    ChunkReader,
    EdgeMemory,
    fill_chunk,
    pack_names,
)
from vla_edge.core.shared_buffer import LogRing, SharedMemoryFile, SlotRing

NAMES = ("j1", "j2", "gripper")
N = len(NAMES)
# Fields that other processes rely on, by name and meaning; records may grow.
FIELDS = {
    "chunk": "session S16, sequence u8, base_tick i8, observation_stamp_ns i8, period_s f8, names 3 S32, horizon u4, "
             "width u4, positions 64x3 f8",
    "motor": "tick i8, stamp_ns i8, position 3 f8, velocity 3 f8, acceleration 3 f8, state u1, reason u1, rearm u1, "
             f"segment u4, missed u8, limited u8, accepted u8, rejects {len(REJECTS)} u4, stops u4, stalls u4, "
             "scheduling S96, pid u4, plan_rows u4, plan 64x3 f8",
    "joints": "sequence u8, stamp_ns i8, position 3 f8, velocity 3 f8",
    "control": "rearm u8, estop u8, presses u8, pressed u1, heard_ns i8",
    "policy": "loops u8, stamp_ns i8, pid u4, ready u1, skill u1, why_not S32, context_ns i8, refused S32, "
              "refused_count u4, refused_ns i8",
    "io": "loops u8, stamp_ns i8, pid u4, session S16, tick_cursor u8",
    "recorder": "loops u8, stamp_ns i8, pid u4",
    "ticks": "tick i8, stamp_ns i8, lateness_ns i8, work_ns i8, state u1, reason u1, segment u4, chunk_sequence u8, "
             "offered_sequence u8, offered_verdict u1, measured_stamp_ns i8, rearms u8, estops u8, estop_presses u8, "
             "estop_input u1, missed u8, position 3 f8, velocity 3 f8",
}


@pytest.fixture
def memory(tmp_path):
    made = EdgeMemory.create("test", N, tmp_path)
    yield made
    made.close()
    made.file.unlink()


def described(dtype):
    """A field as in FIELDS."""
    shape, kind = "x".join(map(str, dtype.shape)), dtype.base
    name = f"S{kind.itemsize}" if kind.kind == "S" else f"{kind.kind}{kind.itemsize}"
    assert kind.byteorder in "<|=" and np.dtype(kind).newbyteorder("<") == kind, "little-endian"
    return f"{shape} {name}".strip()


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_its_name_type_and_size(memory, name):
    dtype = memory.dtypes[name]
    found = {field: described(dtype[field]) for field in dtype.names}
    for field in FIELDS[name].split(", "):
        key, kind = field.split(" ", 1)
        assert found.get(key) == kind, key


def test_every_record_is_described():
    assert set(EdgeMemory.private(2).dtypes) == set(FIELDS)
    assert (MAX_HORIZON, NAME_BYTES, TICK_LOG) == (64, 32, 2048)


def test_records_are_for_so_many_joints():
    for joints in (1, 7):
        memory = EdgeMemory.private(joints)
        assert memory.joints == joints
        for name, field in (("motor", "plan"), ("ticks", "position"), ("joints", "velocity"), ("chunk", "names")):
            assert memory.dtypes[name][field].shape[-1] == joints


def test_rings_lie_one_after_the_other_in_whole_cache_lines_and_fill_the_file(memory):
    """Written in turn with all their slots, none changes another; the digest before them stays as it is."""
    digest = memory.file.buffer[:64]
    expected = 64 + sum(SlotRing.size(dtype.itemsize) for name, dtype in memory.dtypes.items() if name != "ticks")
    assert len(memory.file.buffer) == expected + LogRing.size(memory.dtypes["ticks"].itemsize, TICK_LOG)
    order = list(memory.dtypes)
    for number in range(1, 9):
        for name in order[:-1]:
            record = memory.blank(name)
            record = np.frombuffer(bytes([16 * order.index(name) + number]) * record.nbytes, record.dtype).reshape(())
            assert memory.write(name, record) == number
    log = memory.blank("ticks")
    for k in range(TICK_LOG + 1):
        log["tick"] = k
        memory.ticks.append(log.tobytes())
    for name in order[:-1]:
        sequence, record = memory.read(name)
        assert sequence == 8 and set(record.tobytes()) == {16 * order.index(name) + 8}
    following, rows, lost = memory.ticks.drain(0, TICK_LOG)
    ticks = np.frombuffer(b"".join(rows), dtype=memory.dtypes["ticks"])["tick"]
    assert (following, lost) == (TICK_LOG + 1, 1) and (ticks == np.arange(1, TICK_LOG + 1)).all()
    assert memory.file.buffer[:64] == digest and set(digest[32:]) == {0}


def test_the_file_begins_with_a_digest_of_all_layouts(memory):
    digest = memory.file.buffer[:32]
    assert len(set(digest)) > 10
    assert digest == EdgeMemory._digest(N) != EdgeMemory._digest(N + 1)
    assert len(digest) == 32


def test_memory_lies_where_it_is_told_under_its_label(tmp_path):
    memory = EdgeMemory.create("arm7", N, tmp_path)
    assert memory.file.path.parent == tmp_path and memory.file.path.name.split(".")[1] == "arm7"
    memory.close()


def test_memory_of_one_edge_is_opened_by_its_other_processes(memory):
    record = memory.blank("joints")
    record["position"] = (1.0, 2.0, 3.0)
    memory.write("joints", record)
    other = EdgeMemory.open(memory.file.path, N)
    assert other.joints == N and other.file.path == memory.file.path
    assert other.read("joints")[1]["position"].tolist() == [1.0, 2.0, 3.0]
    other.close()
    with pytest.raises(ValueError):
        other.file.buffer[0]  # unmapped


@pytest.mark.parametrize("joints, spoilt", [(N + 1, None), (N - 1, None), (N, 0), (N, 31)])
def test_memory_of_another_layout_is_refused_and_let_go(memory, joints, spoilt, monkeypatch):
    if spoilt is not None:
        memory.file.buffer[spoilt] ^= 1
    closed, real = [], SharedMemoryFile.close
    monkeypatch.setattr(SharedMemoryFile, "close", lambda self: (closed.append(self), real(self)))
    with pytest.raises(ValueError) as error:
        EdgeMemory.open(memory.file.path, joints)
    assert str(error.value) == (
        f"{memory.file.path} has another layout: stop the edge and start all of it from one release")
    assert len(closed) == 1


def test_the_right_digest_alone_is_not_enough(memory):
    """A longer file with the right digest is refused, too."""
    with open(memory.file.path, "ab") as file:
        file.write(b"\0" * 64)
    with pytest.raises(ValueError, match="another layout"):
        EdgeMemory.open(memory.file.path, N)


def test_private_memory_has_no_file():
    memory = EdgeMemory.private(N)
    assert len(memory.file.buffer) == EdgeMemory._size(N)
    record = memory.blank("control")
    record["rearm"] = 3
    assert memory.write("control", record) == 1 and int(memory.read("control")[1]["rearm"]) == 3
    assert str(memory.file.path) == "."
    memory.close()


def test_reading_gives_the_newest_once_as_its_type(memory):
    assert memory.read("control") is None
    record = memory.blank("control")
    assert record.shape == () and record.dtype == memory.dtypes["control"] and set(record.tobytes()) == {0}
    for k in (1, 2, 3):
        record["rearm"] = k
        assert memory.write("control", record) == k
    sequence, found = memory.read("control", 2)
    assert sequence == 3 and found.shape == () and found.dtype == record.dtype and int(found["rearm"]) == 3
    assert memory.read("control", 3) is None


# ------------------------------------------------------------------ chunks


def a_chunk(horizon=4, width=N, names=NAMES, **changes):
    positions = 1.0 + np.arange(float(horizon * width)).reshape(horizon, width)
    fields = {"session": "0123456789abcdef", "sequence": 2**63, "base_tick": -5, "observation_stamp_ns": -7,
              "period_s": 0.01, "names": names, "positions": positions}
    return ActionChunk(**{**fields, **changes})


@pytest.mark.parametrize("horizon", [0, 1, MAX_HORIZON])
def test_a_chunk_of_any_length_that_fits(memory, horizon):
    record = memory.blank("chunk")
    record["positions"] = -1.0
    fill_chunk(record, a_chunk(horizon))
    assert (record["positions"][horizon:] == -1.0).all()
    assert int(record["horizon"]) == horizon and int(record["width"]) == N
    memory.write("chunk", record)
    found = ChunkReader(NAMES).chunk(memory.read("chunk")[1])
    expected = a_chunk(horizon)
    assert (found.session, found.sequence, found.base_tick, found.observation_stamp_ns, found.period_s, found.names) == (
        expected.session, expected.sequence, expected.base_tick, expected.observation_stamp_ns, expected.period_s, NAMES)
    assert type(found.sequence) is type(found.base_tick) is type(found.observation_stamp_ns) is int
    assert type(found.period_s) is float and type(found.session) is str
    np.testing.assert_array_equal(found.positions, expected.positions)


@pytest.mark.parametrize("chunk, text", [
    (a_chunk(MAX_HORIZON + 1), "65 x 3 for 3"), (a_chunk(4, 2, NAMES[:2]), "4 x 2 for 2"), (a_chunk(4, 4), "4 x 4 for 3"),
    (a_chunk(4, 3, NAMES[:2]), "4 x 3 for 2"), (a_chunk(4, 3, (*NAMES, "j4")), "4 x 3 for 4"),
])
def test_a_chunk_that_does_not_fit_leaves_the_record_alone(memory, chunk, text):
    record = memory.blank("chunk")
    with pytest.raises(ValueError) as error:
        fill_chunk(record, chunk)
    assert str(error.value) == f"chunk of {text} joints does not fit the shared memory"
    assert set(record.tobytes()) == {0}


def test_names_up_to_32_bytes_are_kept_whole_and_longer_ones_refused():
    names = ("a" * 32, "ü" * 16, "b")
    packed = pack_names(names)
    assert packed.dtype == np.dtype("S32") and [bytes(name).decode() for name in packed] == list(names)
    for name in ("a" * 33, "ü" * 16 + "x"):
        with pytest.raises(ValueError) as error:
            pack_names(("ok", name))
        assert str(error.value) == f"joint name {name!r} is longer than 32 bytes"


def test_the_robots_own_names_are_the_ones_given(memory):
    """Equal bytes: the very same tuple, so that nothing is decoded in the motor loop. Others: as written."""
    record = memory.blank("chunk")
    reader = ChunkReader(NAMES)
    fill_chunk(record, a_chunk())
    assert reader.chunk(record).names is NAMES
    fill_chunk(record, a_chunk(names=("j2", "j1", "grüpper")))
    assert reader.chunk(record).names == ("j2", "j1", "grüpper")


def test_bytes_that_are_no_text_are_read_as_wrong_text(memory):
    record = memory.blank("chunk")
    fill_chunk(record, a_chunk())
    record["names"][1], record["session"] = b"\xff\xfe", b"\xff01"
    found = ChunkReader(NAMES).chunk(record)
    assert found.names == ("j1", "\ufffd\ufffd", "gripper") and found.session == "\ufffd01"


@pytest.mark.parametrize("horizon, width, shape", [
    (MAX_HORIZON, N, (MAX_HORIZON, N)), (MAX_HORIZON + 1, N, (0, N)), (2**32 - 1, N, (0, N)), (4, N - 1, (4, N - 1)),
    (4, N + 1, (4, 0)), (4, 2**32 - 1, (4, 0)), (0, 0, (0, 0)),
])
def test_numbers_of_rows_and_joints_that_the_record_cannot_hold_become_0(memory, horizon, width, shape):
    record = memory.blank("chunk")
    fill_chunk(record, a_chunk())
    record["horizon"], record["width"] = horizon, width
    assert ChunkReader(NAMES).chunk(record).positions.shape == shape
