"""MCAP files of wire bytes: ROS 2 message definitions beside unchanged CDR, so Foxglove and ``ros2 bag`` open them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mcap.writer import CompressionType, Writer

from vla_common.messages import full_type, typestore

CHUNK_BYTES: Final = 256 * 1024
"""A killed recorder loses at most this much, before compression, if :meth:`McapRecorder.flush` is called now and then;
``mcap recover`` repairs the rest of its file."""


class RecordingError(RuntimeError):
    """The recording cannot go on; the message holds the remedy."""


class McapRecorder:
    """Writes one file. Close it, or the index at its end is missing. For one thread."""

    def __init__(self, path: Path) -> None:
        """Open the file; its folder is made if needed.

        Raises:
            RecordingError: the file cannot be written.
        """
        self.path = path
        self.messages = 0
        self.counts: dict[str, int] = {}
        """Messages by topic."""
        self._channels: dict[tuple[str, str], int] = {}
        self._schemas: dict[str, int] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
            self._writer = Writer(self._file, chunk_size=CHUNK_BYTES, compression=CompressionType.LZ4)
            self._writer.start(profile="ros2", library="vla-runtime")
        except OSError as error:
            raise self._error(error) from error

    def write(self, topic: str, type_name: str, payload: bytes, log_time_ns: int, publish_time_ns: int,
              sequence: int) -> None:
        """Append a message.

        Args:
            topic: ROS topic. type_name: short or full. payload: CDR with its encapsulation.
            log_time_ns, publish_time_ns: wall clock. sequence: of the publisher, 0 if unknown.

        Raises:
            RecordingError: no space, or the file cannot be written for another reason.
        """
        key = (topic, full_type(type_name))
        try:
            channel = self._channels.get(key)
            if channel is None:
                channel = self._channels[key] = self._writer.register_channel(topic, "cdr", self._schema(key[1]))
            self._writer.add_message(channel, log_time_ns, payload, publish_time_ns, sequence & 0xFFFFFFFF)
        except OSError as error:
            raise self._error(error) from error
        self.messages += 1
        self.counts[topic] = self.counts.get(topic, 0) + 1

    def flush(self) -> None:
        """Hand finished chunks to the operating system: the last bytes of a chunk otherwise wait for the next one, and
        a chunk without them cannot be read.

        Raises:
            RecordingError: see :meth:`write`.
        """
        try:
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error

    def describe(self, name: str, entries: dict[str, str]) -> None:
        """Append a metadata record, such as the settings under which the rest was recorded.

        Raises:
            RecordingError: see :meth:`write`.
        """
        try:
            self._writer.add_metadata(name, entries)
        except OSError as error:
            raise self._error(error) from error
        self.flush()

    def _schema(self, type_name: str) -> int:
        if type_name not in self._schemas:
            text, _ = typestore().generate_msgdef(type_name, ros_version=2)
            self._schemas[type_name] = self._writer.register_schema(type_name, "ros2msg", text.encode())
        return self._schemas[type_name]

    def close(self) -> None:
        """Write the index and close.

        Raises:
            RecordingError: no space for it; what was written before stays readable through ``mcap recover``.
        """
        if self._file.closed:
            return
        try:
            self._writer.finish()  # type: ignore[no-untyped-call]
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error
        finally:
            self._close_file()

    def _close_file(self) -> None:
        try:
            self._file.close()
        except OSError:
            # Flushing the rest failed as the writes before did; that error is the one to report.
            self._file.raw.close()

    def _error(self, error: OSError) -> RecordingError:
        return RecordingError(f"recording to {self.path} stopped: {error.strerror or error}; the robot goes on without "
                              "it. Free space on that disk or record elsewhere (--record), then restart the edge")
