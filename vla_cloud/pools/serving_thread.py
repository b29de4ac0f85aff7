"""The gateway's half of a pool of workers in a thread with an event loop of its own, beside other work.

The thread starts the worker processes and lives until they have ended: the kernel ends them with it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from vla_cloud.config import ServingConfig, WorkerRules
from vla_cloud.pools.service import ServingService
from vla_cloud.pools.supervisor import Supervisor
from vla_cloud.pools.worker_child import WorkerSpec
from vla_cloud.pools.worker_settings import worker_specs
from vla_cloud.pools.workers import Workers, WorkersListener
from vla_common.clock import Clock
from vla_common.process import StopFlag

LOG = logging.getLogger(__name__)
T = TypeVar("T")

_MARGIN_S: Final = 5.0
_LOOK_S: Final = 0.1


class ServingError(RuntimeError):
    """The workers cannot be started; the message says which and where to look."""


class StartInterrupted(ServingError):
    """The process was told to stop while its workers started; they have ended."""


class PoolService(WorkersListener, Protocol):
    """What uses a pool of workers."""

    def attach(self, workers: Workers) -> None:
        """The workers, before they start."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what is under way."""
        ...

    def close(self) -> None:
        """End what is left."""
        ...


Service = TypeVar("Service", bound=PoolService)


class PoolThread(Generic[Service]):
    """Start it, run coroutines on :attr:`service` with :meth:`call`, stop it."""

    def __init__(self, service: Service, specs: Sequence[WorkerSpec], rules: WorkerRules, clock: Clock) -> None:
        """Nothing is started yet."""
        self._rules = rules
        self.service = service
        self.supervisor = Supervisor(specs, rules, clock, service)
        service.attach(self.supervisor)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)

    def start(self, stop: StopFlag | None = None) -> None:
        """Start the workers and wait until all are ready, or until ``stop`` is set.

        Raises:
            ServingError: one is not ready in time, or cannot be started. StartInterrupted: ``stop`` was set before.
        """
        self._thread.start()
        try:
            self._started.result(self._rules.start_s + _MARGIN_S)
            ready = self._wait_ready(stop)
        except (OSError, concurrent.futures.TimeoutError) as error:
            self.stop()
            raise ServingError(f"the workers did not start: {error}") from error
        if not ready:
            states = ", ".join(f"{info.name} {info.state}" for info in self.supervisor.infos())
            self.stop()
            raise ServingError(f"not all workers are ready ({states}): see the log above")

    def _wait_ready(self, stop: StopFlag | None) -> bool:
        assert self._loop is not None
        waiting = asyncio.run_coroutine_threadsafe(self.supervisor.wait_ready(self._rules.start_s), self._loop)
        while stop is not None and not waiting.done():
            if stop.wait(_LOOK_S):
                waiting.cancel()
                self.stop()
                raise StartInterrupted("stopped before the workers were ready")
        return waiting.result()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread's loop, from another thread, and wait for its result."""
        if self._loop is None:
            coroutine.close()
            raise ServingError("the serving engine is not running")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self, drain_s: float = 0.0) -> None:
        """Let requests finish for ``drain_s``, then end them and all workers. Safe to call twice."""
        if self._loop is None or self._end is None or not self._thread.is_alive():
            return
        if drain_s > 0.0:
            self.call(self.service.drain(drain_s))
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            LOG.exception("the thread of the workers ended")
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self.supervisor.start()
            self._started.set_result(None)
            await self._end.wait()
        finally:
            self.service.close()
            await self.supervisor.stop()


class ServingThread(PoolThread[ServingService]):
    """The chat engine: front doors run coroutines on its service."""

    def __init__(self, config: ServingConfig, clock: Clock, specs: Sequence[WorkerSpec] | None = None) -> None:
        """Nothing is started yet. ``specs``: other workers than those of the configuration."""
        super().__init__(ServingService(config, clock), specs or worker_specs(config), config.supervisor, clock)
