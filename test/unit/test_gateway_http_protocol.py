"""A connection is read in small pieces, so that what is dear to parse cannot hold up the others."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
from vla_cloud.gateway.http_protocol import ConnectionRules, guarded_by


def test_reads_are_bounded_whatever_the_transport_would_take() -> None:
    rules = ConnectionRules(max_connections=1, head_timeout_s=1.0)
    protocol = guarded_by(rules)
    # A BufferedProtocol is asked for the buffer of each read; a Protocol gets up to 256 KiB at once.
    assert issubclass(protocol, asyncio.BufferedProtocol)
    assert len(protocol.read_buffer) == rules.read_bytes <= 16_384
    assert guarded_by(rules).read_buffer is not protocol.read_buffer
