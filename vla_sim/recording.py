"""Reads a run's MCAP recording: the wire bytes on their ROS topics, decoded by the project's own wire."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcap.exceptions import McapError
from mcap.reader import make_reader
from mcap.records import Channel, Message, Schema
from mcap.stream_reader import StreamReader

from vla_common.topics import topic_spec
from vla_common.wire import WireError, decode

LOG = logging.getLogger(__name__)


class RecordingError(Exception):
    """A recording that cannot be read; the message holds the remedy."""


@dataclass(frozen=True)
class Recorded:
    """One message. ``log_time_ns`` is the recorder's stamp of receipt."""

    name: str
    log_time_ns: int
    message: Any


class Recording:
    """Messages of one robot by name in the topics table. The files are read anew by every call.

    A recorder that was killed and started again leaves ``recording-2.mcap`` and so on beside ``recording.mcap``; all
    of them are read.
    """

    def __init__(self, path: Path, robot: str, camera: str = "front") -> None:
        """Refuse a file that is not there.

        Raises:
            RecordingError: no such file.
        """
        if not path.is_file():
            raise RecordingError(f"no recording {path}: was the edge started with --record, and did the recorder run?")
        self.paths = [path, *sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"), key=_number)]
        self.refused = 0
        self._robot = robot
        self._camera = camera

    def messages(self, names: Sequence[str]) -> Iterator[Recorded]:
        """Messages of these topics in order of receipt; payloads the wire refuses are counted and skipped."""
        by_topic = {topic_spec(name).topic(self._robot, self._camera): name for name in names}
        for topic, type_name, log_time_ns, data in self._raw(list(by_topic)):
            try:
                message = decode(type_name, data)
            except (WireError, KeyError) as error:
                self.refused += 1
                LOG.debug("%s: %s", topic, error)
                continue
            yield Recorded(by_topic[topic], log_time_ns, message)

    def _raw(self, topics: list[str]) -> Iterator[tuple[str, str, int, bytes]]:
        for path in self.paths:
            yield from _raw(path, topics)


def _number(path: Path) -> int:
    """``recording-12.mcap`` → 12."""
    text = path.stem.rpartition("-")[2]
    return int(text) if text.isdigit() else 0


def _raw(path: Path, topics: list[str]) -> Iterator[tuple[str, str, int, bytes]]:
    """Topic, type name, log time and payload; of a file without an index, everything up to its last whole chunk."""
    wanted = set(topics)
    with path.open("rb") as file:
        try:
            for schema, channel, message in make_reader(file).iter_messages(topics=topics):
                if schema is not None:
                    yield channel.topic, schema.name, message.log_time, message.data
            return
        except McapError as error:
            LOG.info("%s has no index (%s): its recorder was killed; reading what is there", path.name,
                     type(error).__name__)
        file.seek(0)
        schemas: dict[int, str] = {}
        channels: dict[int, tuple[str, int]] = {}
        try:
            for record in StreamReader(file).records:
                if isinstance(record, Schema):
                    schemas[record.id] = record.name
                elif isinstance(record, Channel):
                    channels[record.id] = (record.topic, record.schema_id)
                elif isinstance(record, Message) and channels[record.channel_id][0] in wanted:
                    topic, schema_id = channels[record.channel_id]
                    yield topic, schemas[schema_id], record.log_time, record.data
        except (McapError, EOFError, struct.error) as error:
            LOG.debug("%s ends early: %s", path.name, type(error).__name__)
