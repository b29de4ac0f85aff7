"""What the recorder's file holds after a fault, read without the index that a cut file lacks."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

from matrix_rig import CLOCK, MatrixRig
from mcap.exceptions import McapError
from mcap.reader import NonSeekingReader

from vla_common import wire
from vla_common.clock import NS_PER_S
from vla_edge.adapters.mcap_recorder import CHUNK_BYTES


def files(rig: MatrixRig) -> list[Path]:
    """Recordings, oldest first."""
    return sorted(rig.record.parent.glob(f"{rig.record.stem}*{rig.record.suffix}"), key=lambda p: p.stat().st_mtime_ns)


def note_fault(rig: MatrixRig) -> None:
    """Remember which file is written and when the fault came."""
    rig.recorded = (files(rig)[-1], CLOCK.monotonic_ns())


def fill_disk(rig: MatrixRig) -> None:
    """No file of the running recorder may grow much further; images of 1 MB/s take it there.

    The log, to which the recorder writes too, must not come up against the limit.
    """
    if recorder_ended(rig):  # in an attempt before this one
        return
    note_fault(rig)
    rig.tell("robot", image_bytes=100_000)
    size = max(rig.recorded[0].stat().st_size, rig.log.stat().st_size, CHUNK_BYTES) + 3 * CHUNK_BYTES // 2
    resource.prlimit(rig.pid("recorder"), resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def recorder_ended(rig: MatrixRig) -> bool:
    return "recorder is not started again" in rig.log.read_text()


def recorder_restarted(rig: MatrixRig) -> bool:
    """Another recorder writes another file."""
    path, fault_ns = rig.recorded
    return files(rig)[-1] != path and rig.beat_ns("recorder") > fault_ns + NS_PER_S // 10


def check_readable(rig: MatrixRig) -> None:
    """What was recorded before the fault can be read, but for the last chunk, which had not left the process."""
    path, fault_ns = rig.recorded
    stamps, payload_bytes = [], 0
    with path.open("rb") as file:
        try:
            for schema, channel, message in NonSeekingReader(file).iter_messages(log_time_order=False):
                # Images come and go with the cells; without them the rate is even.
                payload_bytes += 0 if "image" in channel.topic or "observation" in channel.topic else len(message.data)
                if channel.topic.endswith("joint_command"):
                    stamps.append(wire.stamp_ns(wire.decode(schema.name, message.data).header))
        except (McapError, struct.error, EOFError):
            pass  # the cut end
    assert len(stamps) > 1, f"nothing can be read in {path} of {path.stat().st_size} bytes"
    assert stamps == sorted(set(stamps)), "recorded commands are out of order"
    bytes_per_s = payload_bytes / ((stamps[-1] - stamps[0]) / 1e9)
    lost_s = (fault_ns - stamps[-1]) / 1e9
    assert (lost_s - 0.5) * bytes_per_s < CHUNK_BYTES, f"{lost_s:.1f} s before the fault cannot be read in {path}"
