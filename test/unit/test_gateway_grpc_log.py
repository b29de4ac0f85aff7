"""What grpc.aio logs of clients that have gone or send nonsense is left out, what it logs of our faults is not."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("grpc", reason="grpc is not installed: pip install 'vla-runtime[gateway]'")
from vla_cloud.gateway import grpc_server  # noqa: F401


def test_only_faults_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("grpc._cython.cygrpc")
    log.error("ExecuteBatchError raised in core by servicer method [/vla.v1.Chat/Abort]")
    log.error("Invalid encoding on %s", b"\xff")
    log.error("Unexpected [ValueError] raised by servicer method [/vla.v1.Chat/Abort]")
    assert [record.getMessage() for record in caplog.records] == [
        "Unexpected [ValueError] raised by servicer method [/vla.v1.Chat/Abort]"
    ]
