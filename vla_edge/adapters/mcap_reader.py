"""Reads MCAP files in one pass, with or without the index at their end: a killed recorder leaves none."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcap.exceptions import McapError
from mcap.records import Channel, Message, Metadata, Schema
from mcap.stream_reader import StreamReader

LOG = logging.getLogger(__name__)


class ReadError(ValueError):
    """A file that is no recording; the message holds the remedy."""


@dataclass(frozen=True)
class McapMessage:
    """One message. ``type_name`` is the full ROS type, ``payload`` CDR with its encapsulation."""

    topic: str
    type_name: str
    payload: bytes


@dataclass(frozen=True)
class McapMetadata:
    """One metadata record."""

    name: str
    entries: dict[str, str]


def read_mcap(path: Path) -> Iterator[McapMessage | McapMetadata]:
    """Everything in a file in the order of writing; of a file cut short, everything up to its last whole chunk.

    Raises:
        ReadError: the file is not there or is no MCAP file.
    """
    schemas: dict[int, str] = {}
    channels: dict[int, tuple[str, int]] = {}
    begun = False
    try:
        with path.open("rb") as file:
            for record in StreamReader(file).records:
                begun = True
                if isinstance(record, Schema):
                    schemas[record.id] = record.name
                elif isinstance(record, Channel):
                    channels[record.id] = (record.topic, record.schema_id)
                elif isinstance(record, Metadata):
                    yield McapMetadata(record.name, dict(record.metadata))
                elif isinstance(record, Message):
                    topic, schema_id = channels[record.channel_id]
                    yield McapMessage(topic, schemas.get(schema_id, ""), record.data)
    except OSError as error:
        raise ReadError(f"cannot read {path}: {error.strerror or error}") from error
    except (McapError, EOFError, struct.error, RuntimeError) as error:
        if not begun:
            raise ReadError(f"{path} is no MCAP file: {error or type(error).__name__}") from error
        LOG.warning("%s ends early (%s): its recorder was killed; reading what is there", path, type(error).__name__)
