"""Starts worker processes, watches them, starts them again; tells the gateway who can be given work.

A worker is *ready* from its Ready to the loss of its link. It is killed when it closes its link, sends what is no
message, leaves messages unread, does not get ready in time, or does not answer a Ping from the thread that runs the
model: a stopped (SIGSTOP) or hung process is noticed as a dead one is. A worker that ends with EXIT_PERMANENT is not
started again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Final

from vla_cloud.config import WorkerRules
from vla_cloud.pools.link import GatewayLink, LinkServer
from vla_cloud.pools.messages import (
    PROTOCOL_VERSION,
    Drain,
    Drained,
    Error,
    Hello,
    Join,
    LaneReady,
    Ping,
    Pong,
    Ready,
    Shutdown,
    ToGateway,
    ToWorker,
)
from vla_cloud.pools.socket_folder import SocketFolder
from vla_cloud.pools.worker_child import WorkerChild, WorkerSpec
from vla_cloud.pools.workers import WorkerInfo, WorkersListener
from vla_common.clock import NS_PER_S, Clock
from vla_common.process import spawn, stop_all

LOG = logging.getLogger(__name__)

EXIT_PERMANENT: Final = 3
"""A worker's exit code: starting it again would fail the same way."""

SECRET_VARIABLE: Final = "VLA_LINK_SECRET"
POLL_S: Final = 0.02
LAST_STEPS_S: Final = 0.5
"""A process that has closed its link may take so long to end by itself, so that its exit code is its own."""
DRAINED: Final = "drained"
_STALL_NS: Final = NS_PER_S


class Supervisor:
    """Runs the workers of one gateway.

    All methods in one event loop, in a thread that lives until :meth:`stop` has returned: the kernel ends the children
    when the thread that started them ends.
    """

    def __init__(
        self, specs: Sequence[WorkerSpec], rules: WorkerRules, clock: Clock, listener: WorkersListener,
        address: str | None = None,
    ) -> None:  # fmt: skip
        """Nothing is started yet. ``address``: of the control links; default a Unix socket in a private folder."""
        if len({spec.name for spec in specs}) != len(specs) or not specs:
            raise ValueError("a supervisor needs at least one worker, and names that differ")
        self._rules, self._clock, self._listener = rules, clock, listener
        self._processes = [WorkerChild(spec, rules) for spec in specs]
        self._address = address
        self._folder: SocketFolder | None = None
        self._secret = secrets.token_hex(16)
        self._server = LinkServer(self, self._secret)
        self._timer: asyncio.TimerHandle | None = None
        self._looked_ns = 0
        self._changed = asyncio.Event()
        self._stopping = False

    async def start(self) -> None:
        """Listen, start all workers and watch them. See :meth:`wait_ready`."""
        if self._address is None:
            self._folder = SocketFolder()
            self._address = f"unix:{self._folder.path / 'link'}"
        await self._server.listen(self._address)
        for process in self._processes:
            self._start(process)
        self._looked_ns = self._clock.monotonic_ns()
        self._look_again()

    async def wait_ready(self, timeout_s: float) -> bool:
        """True once all workers are ready; False when one cannot be started, or after the time."""
        deadline_ns = self._clock.monotonic_ns() + round(timeout_s * NS_PER_S)
        while not all(process.state == "ready" for process in self._processes):
            left_s = (deadline_ns - self._clock.monotonic_ns()) / NS_PER_S
            if left_s <= 0 or any(process.state == "failed" for process in self._processes):
                return False
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except asyncio.TimeoutError:
                return False
        return True

    def send(self, worker_id: str, message: ToWorker) -> bool:
        """See :class:`vla_cloud.pools.workers.Workers`."""
        process = self._find(worker_id)
        return process is not None and process.link is not None and process.link.send(message)

    def infos(self) -> list[WorkerInfo]:
        """All workers, in the order given."""
        return [
            WorkerInfo(
                process.spec.name, process.spec.role if process.ready is None else process.ready.role, process.state,
                process.worker_id, process.child_pid, max(0, process.starts - 1),
                process.load, process.detail, process.role_switches,
            )
            for process in self._processes
        ]  # fmt: skip

    def drain(self, name: str) -> None:
        """Have a worker finish what it has and take nothing new; it is started anew when it is done."""
        for process in self._processes:
            if process.spec.name == name and process.link is not None and process.state == "ready":
                self._set(process, "draining")
                self._listener.worker_draining(process.worker_id)
                process.link.send(Drain())

    async def stop(self) -> None:
        """End all workers, kill those that do not end, and remove the socket. Safe to call twice."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        children = [process.child for process in self._processes if process.child is not None]
        for process in self._processes:
            if process.link is not None:
                process.link.send(Shutdown())
        if children:
            await asyncio.to_thread(stop_all, children, self._rules.stop_s)
        for process in self._processes:
            self._gone(process, "the gateway ends")
            self._set(process, "stopped")
        await self._server.close()
        if self._folder is not None:
            self._folder.close()

    # LinkListener

    def link_opened(self, join: Join, link: GatewayLink) -> bool:
        """A process has connected with the secret."""
        process = self._find(join.worker)
        if process is None or process.link is not None or process.state != "starting" or self._stopping:
            return False
        process.link = link
        return link.send(Hello(PROTOCOL_VERSION, process.worker_id))

    def link_message(self, link: GatewayLink, message: ToGateway) -> None:
        """A worker's message."""
        process = self._find(link.worker)
        if process is None or process.link is not link:
            return
        process.answered_ns = self._clock.monotonic_ns()
        match message:
            case Pong(_, load):
                process.load = load
                if process.announced:
                    self._listener.worker_message(process.worker_id, message)
            case Ready() | LaneReady():
                self._ready(process, message)
            case Drained():
                self._end(process, DRAINED)
            case Error(code, text, request_id) if not request_id:
                process.detail = f"{code}: {text}"
                LOG.error("worker %s: %s", process.worker_id, process.detail)
            case _ if process.announced:
                self._listener.worker_message(process.worker_id, message)

    def link_closed(self, link: GatewayLink, reason: str) -> None:
        """A worker's link is over, and so is the worker."""
        process = self._find(link.worker)
        if process is not None and process.link is link:
            if not self._stopping:
                LOG.error("worker %s (process %d): %s", process.worker_id, process.child_pid, reason)
                self._gone(process, reason)
                process.kill_ns = self._clock.monotonic_ns() + round(LAST_STEPS_S * NS_PER_S)

    # watching

    def _look_again(self) -> None:
        # Set before looking: whatever goes wrong in one look, the next one comes.
        self._timer = asyncio.get_running_loop().call_later(POLL_S, self._look_again)
        self.look()

    def look(self) -> None:
        """Notice ended and hung workers, send heartbeats, start what is due."""
        now_ns = self._clock.monotonic_ns()
        stalled_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        for process in self._processes:
            if stalled_ns > _STALL_NS:  # this process did not run: answers may lie unread, nobody else is to blame
                process.answered_ns += stalled_ns
                process.backoff.started_ns += stalled_ns
            if process.child is not None:
                code = process.child.poll()
                if code is not None:
                    self._ended(process, code, now_ns)
                elif not process.lost:
                    self._check(process, now_ns)
                elif now_ns >= process.kill_ns:
                    process.kill()
            elif process.backoff.due_ns is not None and now_ns >= process.backoff.due_ns:
                self._start(process)

    def _check(self, process: WorkerChild, now_ns: int) -> None:
        """A process that runs: is it alive?"""
        if process.state == "starting":
            if now_ns - process.backoff.started_ns > self._rules.start_s * NS_PER_S:
                self._end(process, f"not ready within {self._rules.start_s:g} s")
            return
        if now_ns - process.answered_ns > self._rules.hang_s * NS_PER_S:
            self._end(process, f"no answer for {self._rules.hang_s:g} s")
        elif now_ns >= process.next_ping_ns and process.link is not None:
            process.sequence += 1
            process.next_ping_ns = now_ns + round(self._rules.heartbeat_s * NS_PER_S)
            process.link.send(Ping(process.sequence))

    def _start(self, process: WorkerChild) -> None:
        process.starts += 1
        process.ready = process.load = None
        process.announced, process.lost, process.detail = False, False, ""
        environment = {**process.spec.environment, SECRET_VARIABLE: self._secret}
        command = process.spec.command(self._server.address, process.worker_id)
        process.child = spawn(command, environment=environment, log_path=process.spec.log_path)
        process.answered_ns = self._clock.monotonic_ns()
        process.backoff.started(process.answered_ns)
        self._set(process, "starting")

    def _ready(self, process: WorkerChild, ready: Ready | LaneReady) -> None:
        if ready.version != PROTOCOL_VERSION or ready.worker != process.worker_id:
            self._end(process, f"answered for {ready.worker!r}, protocol {ready.version}: mixed installations?")
            return
        process.role_switches += process.ready is not None and process.ready.role != ready.role
        process.ready = ready
        if process.state == "starting":
            self._set(process, "ready")
        process.announced = True
        self._listener.worker_ready(process.worker_id, ready)

    def _end(self, process: WorkerChild, reason: str) -> None:
        """Kill it; :meth:`look` notices when it is dead."""
        level = logging.INFO if reason == DRAINED else logging.ERROR
        LOG.log(level, "worker %s (process %d): %s", process.worker_id, process.child_pid, reason)
        process.kill()
        self._gone(process, reason)

    def _gone(self, process: WorkerChild, reason: str) -> None:
        """Tell that no message comes any more."""
        link, process.link = process.link, None
        if link is not None:
            link.cut(reason)
        if not process.lost:
            process.lost, process.detail = True, process.detail or reason
            self._set(process, "stopped" if self._stopping else "waiting")
            if process.announced:
                self._listener.worker_lost(process.worker_id, reason)

    def _ended(self, process: WorkerChild, code: int, now_ns: int) -> None:
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._gone(process, how)
        process.child = None
        if process.announced:
            process.announced = False
            self._listener.worker_dead(process.worker_id)
        if code == EXIT_PERMANENT:
            self._set(process, "failed")
            LOG.critical("worker %s cannot work (see above) and is not started again", process.worker_id)
        elif not self._stopping:
            delay_s = process.backoff.ended(now_ns)
            level = logging.INFO if process.detail == DRAINED else logging.ERROR
            LOG.log(level, "worker %s ended (%s): another starts in %.2f s", process.worker_id, how, delay_s)

    def _set(self, process: WorkerChild, state: str) -> None:
        process.state = state
        self._changed.set()

    def _find(self, worker_id: str) -> WorkerChild | None:
        return next((process for process in self._processes if process.worker_id == worker_id), None)
