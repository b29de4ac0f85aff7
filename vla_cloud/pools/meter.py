"""What the serving engine counts of its requests, for metrics."""

from __future__ import annotations

from typing import Any, Final

from vla_cloud.core import life_events as life
from vla_cloud.core.distribution import Buckets
from vla_common.metrics import Counters

QUEUE_S: Final = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_CAUSES: Final[dict[type[life.Event], str]] = {
    life.Refused: "refused", life.PushFailed: "push_failed", life.WorkerLost: "worker_lost",
    life.WorkerDead: "worker_lost", life.Aborted: "given_up", life.Tick: "transfer_late",
}  # fmt: skip
RETRY_CAUSES: Final = ("refused", "push_failed", "transfer", "transfer_late", "worker_lost", "given_up", "error")


class RequestMeter:
    """For the event loop of the service."""

    def __init__(self) -> None:
        """Nothing has happened."""
        self._queue_s = Buckets(QUEUE_S)
        self._causes = Counters(*RETRY_CAUSES)
        self._placed_again = 0

    def begun(self, waited_s: float) -> None:
        """A request leaves the gateway's queue."""
        self._queue_s.add(waited_s)

    def retried(self, event: life.Event) -> None:
        """An attempt has ended without an answer, because of ``event``, and another begins."""
        if isinstance(event, life.Failed):
            cause = "transfer" if event.transfer else "error"
        else:
            cause = _CAUSES.get(type(event), "error")
        self._causes.add(cause)

    def placed(self, attempt: int) -> None:
        """An attempt got its workers; after the first one they compute the prompt again, save what they have cached."""
        self._placed_again += attempt > 0

    def snapshot(self) -> dict[str, Any]:
        """Plain values, part of ``ServingService.health()``."""
        causes = self._causes.snapshot()
        return {
            "retries": sum(causes.values()), "retry_causes": causes, "reprefills": self._placed_again,
            "queue_wait": self._queue_s.snapshot(),
        }  # fmt: skip
