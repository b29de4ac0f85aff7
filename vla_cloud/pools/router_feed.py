"""What workers report of themselves, for the router: changes of their prefix trees, and their load."""

from __future__ import annotations

from collections.abc import Callable

from vla_cloud.core.placement import Placement
from vla_cloud.pools import messages as wire


class RouterFeed:
    """Takes KvEvents and Pong out of a worker's messages; asks for a snapshot where events were lost."""

    def __init__(self, placement: Placement, send: Callable[[str, wire.ToWorker], None]) -> None:
        """``send(worker_id, message)`` never waits."""
        self._placement, self._send = placement, send

    def take(self, worker_id: str, message: wire.ToGateway) -> bool:
        """True if the message was one of these."""
        match message:
            case wire.KvEvents(first_sequence, rows):
                if self._placement.take_events(worker_id, first_sequence, rows):
                    self._send(worker_id, wire.KvSnapshot())
            case wire.Pong(_, load):
                self._placement.take_load(worker_id, load.active_tokens)
            case _:
                return False
        return True
