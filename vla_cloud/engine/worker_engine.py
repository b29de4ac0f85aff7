"""The engine of one worker: takes messages, makes steps, tells the gateway what came of it. One thread calls all of it.

A step has two halves. The first looks around (arrivals, failed pushes, leases, deadlines) and plans; the second
computes. When the first half has something to tell, ``step`` returns between the two, so that a first token or a
reservation does not wait for a forward pass; an abort that comes in between still counts for the planned step.

Every accepted attempt ends with one final message, whatever raises.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from vla_cloud.core.block_pool import BlockPool
from vla_cloud.core.generate import EngineFailed, GenerateRequest, RequestError, check_request
from vla_cloud.core.radix_tree import RadixTree
from vla_cloud.core.scheduler import Scheduler
from vla_cloud.core.step_plan import Finished, Role, SchedulerConfig, StepPlan
from vla_cloud.core.transfer_plan import TransferConfig
from vla_cloud.engine import reports
from vla_cloud.engine.decode_side import DecodeSide
from vla_cloud.engine.grammars import GrammarBackend, Grammars
from vla_cloud.engine.intake import Intake
from vla_cloud.engine.outbox import Outbox
from vla_cloud.engine.prefill_side import PrefillSide, push_failed
from vla_cloud.engine.runner import ModelRunner
from vla_cloud.engine.step_runner import StepOutcome, StepRunner, take_out
from vla_cloud.engine.swap import HostSwap
from vla_cloud.engine.totals import Totals
from vla_cloud.engine.work_ledger import WorkLedger, text_of
from vla_cloud.kv_transfer.connector import KvReceiver, KvSender
from vla_cloud.pools import messages
from vla_cloud.pools.messages import PROTOCOL_VERSION, ToGateway, ToWorker
from vla_common.clock import NS_PER_S, Clock

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one worker; the role is that of ``scheduler``.

    ``cache_blocks`` bounds the prefix tree (None: the pool). After ``max_broken_steps`` steps in a row that raised
    and could not be laid to one request, the worker ends.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    eos_token_ids: tuple[int, ...] = ()
    cache_blocks: int | None = None
    max_broken_steps: int = 3


class WorkerEngine:
    """One worker of role prefill (needs ``sender``), decode (needs ``receiver``) or both (needs neither)."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Clock,
        sender: KvSender | None = None,
        receiver: KvReceiver | None = None,
        grammars: GrammarBackend | None = None,
    ) -> None:
        """Owns the runner's KV pool, and the connectors, which :meth:`close` closes. Raises ValueError."""
        limits = config.scheduler
        self.role = limits.role
        if (sender is not None, receiver is not None) != (self.role is Role.PREFILL, self.role is Role.DECODE):
            raise ValueError(f"wrong connectors for role {self.role.value}: prefill has a sender, decode a receiver")
        if limits.max_model_len > runner.max_model_len:
            raise ValueError(f"max_model_len {limits.max_model_len} is above the model's {runner.max_model_len}")
        self._runner = runner
        self._config = config
        self._clock = clock
        self.epoch = secrets.randbits(61)
        self.pool = BlockPool(runner.kv.shape[1])
        self.tree = RadixTree(self.pool, config.cache_blocks)
        self.scheduler = Scheduler(limits, self.pool, self.tree, clock)
        self.ledger = WorkLedger()
        self.outbox = Outbox(self.ledger)
        self.swap = HostSwap(runner)
        self.grammars = Grammars(grammars, runner.vocab_size)
        self._steps = StepRunner(runner, self.grammars)
        self.totals = Totals()
        self.prefill_side: PrefillSide | None = None
        self.decode_side: DecodeSide | None = None
        if sender is not None:
            self.prefill_side = PrefillSide(
                sender, runner.layout, self.scheduler, self.ledger, config.transfer, clock, self.totals
            )  # fmt: skip
        if receiver is not None:
            self.decode_side = DecodeSide(
                receiver, self.scheduler, self.pool, self.outbox, self.ledger, runner.vocab_size, self.epoch, clock,
                self.totals,
            )  # fmt: skip
        self._intake = Intake(self)
        self._plan: StepPlan | None = None
        self._broken_steps = 0
        self.draining = False
        self._drained = False
        self.failure: str | None = None
        """Why the engine has ended; None while it works."""
        self.on_step: Callable[[StepPlan, int, int], None] | None = None
        """Told of each forward pass: its plan, begin and end, ns. Must not raise."""

    # -- the surface -----------------------------------------------------------------------------------------------

    def ready(self, worker: str) -> messages.Ready:
        """What the gateway is told of this worker."""
        limits = self._config.scheduler
        return messages.Ready(
            version=PROTOCOL_VERSION,
            worker=worker,
            role=self.role.value,
            pid=os.getpid(),
            epoch=self.epoch,
            address=self.decode_side.receiver.address if self.decode_side is not None else "",
            layout=self._runner.layout,
            total_blocks=self.pool.total,
            max_model_len=self.scheduler.max_len,
            vocab_size=self._runner.vocab_size,
            max_running=limits.max_running,
            max_waiting=limits.max_waiting,
            eos_token_ids=list(self._config.eos_token_ids),
        )

    def handle(self, message: ToWorker) -> None:
        """Take a message (not Hello, not Shutdown). Never raises for what it says; answers come by :meth:`events`."""
        if self.failure is not None:
            return
        try:
            self._intake.take(message)
        except Exception as error:
            LOG.exception("a message could not be taken")
            self.fail(f"a {type(message).__name__} could not be taken: {text_of(error)}")

    def step(self) -> bool:
        """Look around, plan, compute; or half of it. True: call again at once. Never raises.

        False: nothing to do until a message, a readable descriptor of :meth:`wait_fds`, or :meth:`wait_s`.
        """
        if self.failure is not None:
            return False
        try:
            plan = self._plan
            if plan is None:
                plan = self._look_and_plan()
                if plan.empty:
                    self._end(self.scheduler.commit(plan, {}).finished)
                    # Who came back with all but one token cached has its row in the next plan only.
                    return self._close_step() or self.scheduler.load().running > 0
                if self._close_step():
                    self._plan = plan
                    return True
            self._plan = None
            self._compute(plan)
            if self.failure is None:
                self._close_step()
        except Exception as error:  # a fault of the engine must not leave requests without an end
            LOG.exception("the engine failed")
            self.fail(f"the engine failed: {text_of(error)}")
        return self.failure is None

    def events(self) -> list[ToGateway]:
        """Messages for the gateway since the last call, in order."""
        return self.outbox.take()

    def wait_fds(self) -> list[int]:
        """Descriptors that are readable when a transfer has news, or a grammar is compiled."""
        fds = self.grammars.wait_fds()
        if self.prefill_side is not None:
            return [*fds, self.prefill_side.sender.fileno()]
        return [*fds, self.decode_side.receiver.fileno()] if self.decode_side is not None else fds

    def wait_s(self) -> float | None:
        """How long the worker may wait for messages and descriptors after step() said False; None: for ever."""
        deadlines = [record.seq.request.deadline_ns for record in self.ledger]
        deadlines.extend(self._intake.held_until_ns())
        for side in (self.prefill_side, self.decode_side):
            if side is not None:
                deadlines.append(side.next_ns())
        earliest = min((at_ns for at_ns in deadlines if at_ns is not None), default=None)
        return None if earliest is None else max(0, earliest - self.now_ns()) / NS_PER_S

    def close(self) -> None:
        """Stop all transfers and let go of the connectors; what is unfinished is lost. Safe to call twice."""
        for side in (self.prefill_side, self.decode_side):
            if side is not None:
                side.close()
        self.swap.clear()
        self.grammars.close()

    # -- for the intake --------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The engine's clock."""
        return self._clock.monotonic_ns()

    def check(self, request: GenerateRequest) -> None:
        """Raise InvalidRequest for what can never be served here."""
        check_request(request, self.scheduler.max_len, self._runner.vocab_size)

    def abort(self, key: str, error: RequestError | None = None) -> bool:
        """End an attempt; writing stops before any block comes back. False if it has ended."""
        if self.prefill_side is not None:
            self.prefill_side.stop(key)
        return self.scheduler.abort(key, error)

    def load(self) -> messages.Load:
        """For Pong."""
        return reports.load(self.scheduler, self.ledger, self.totals, self.decode_side)

    def fail(self, text: str) -> None:
        """End the worker: every attempt ends by name, then the worker does."""
        self.failure = text[:4096]
        self.outbox.close_step()
        try:
            self.close()  # before the ends are told: they promise that nothing more is written
        except Exception:  # the process ends all the same, and with it every write
            LOG.exception("the connectors could not be closed")
        for record in self.ledger:
            self.outbox.say(self.ledger.fail(record, EngineFailed(f"its worker ended: {text}")))
        self._intake.refuse_held(f"the worker ends: {text}")
        self.outbox.say(messages.Error("INTERNAL", self.failure))

    # -- the two halves of a step ----------------------------------------------------------------------------------

    def _look_and_plan(self) -> StepPlan:
        self._intake.look()
        for side in (self.prefill_side, self.decode_side):
            if side is not None:
                side.look()
        plan = self.scheduler.plan()
        self.totals.planned(plan)
        self._end(plan.finished)
        for seq in plan.reserved:
            assert self.decode_side is not None
            self.decode_side.lend(seq)
        return plan

    def _compute(self, plan: StepPlan) -> None:
        try:
            self.swap.take_out(plan.swap_out)
            self.swap.put_in(plan.swap_in)
        except Exception as error:  # memory, or a device: what was to come in is lost
            LOG.exception("host swap failed")
            self._discard(plan, error)
            return
        side = self.prefill_side
        wanted = side is not None and side.begin_step(plan.prefill)
        began_ns = 0 if self.on_step is None else self.now_ns()
        outcome = self._steps.run(plan, side.on_layer if side is not None and wanted else None)
        if self.on_step is not None:
            self.on_step(plan, began_ns, self.now_ns())
        pushed_early = side.end_step() if side is not None else []
        if outcome.broken is not None:
            self._discard(plan, outcome.broken)
            return
        if outcome.retried:
            # Their first layers left for D from a pass that failed later: not to be trusted.
            for key in pushed_early:
                outcome.failed.setdefault(key, push_failed("INTERNAL", "the model failed while its KV was pushed"))
        self._broken_steps = 0
        self._commit(plan, outcome)

    def _commit(self, plan: StepPlan, outcome: StepOutcome) -> None:
        for key, error in outcome.failed.items():
            self.abort(key, error)
        take_out(plan, set(outcome.failed))
        sampled = outcome.sampled
        result = self.scheduler.commit(plan, {key: one.token_id for key, one in sampled.items()})
        for seq, _ in result.tokens:
            self.outbox.token(seq, len(seq.tokens) - 1, sampled[seq.request_id])
        for seq in result.to_push:
            assert self.prefill_side is not None
            self.prefill_side.finish(seq, sampled[seq.request_id])
        self._end(result.finished)

    def _discard(self, plan: StepPlan, error: BaseException) -> None:
        """Nothing of the step can be used."""
        self._end(self.scheduler.discard(plan, EngineFailed(f"the step failed: {text_of(error)}")))
        self._broken_steps += 1
        if self._broken_steps >= self._config.max_broken_steps:
            self.fail(f"{self._broken_steps} steps in a row failed; the last: {text_of(error)}")

    def _end(self, finished: list[Finished]) -> None:
        """Transfers and host copies of the ended go, before another step uses their blocks; then they are told."""
        for one in finished:
            self.swap.drop(one.request_id)
            self.grammars.end(one.request_id)
            if self.prefill_side is not None:
                self.prefill_side.stop(one.request_id)
            if self.decode_side is not None:
                self.decode_side.ended(one.request_id, one.quarantined_writer)
            self._log_end(one)
            self.outbox.end(one)

    def _log_end(self, one: Finished) -> None:
        """A line per attempt, for whoever follows one request through the processes (VLA_LOG=debug)."""
        record = self.ledger.get(one.request_id)
        if record is None or not LOG.isEnabledFor(logging.DEBUG):
            return
        seq, request_id = one.seq, record.request_id.rpartition("~")[0] or record.request_id
        outcome = one.reason.value if one.error is None else type(one.error).__name__
        told = {
            "request_id": request_id, "attempt": record.attempt, "outcome": outcome,
            "prompt_tokens": seq.prompt_tokens, "cached_tokens": seq.cached_tokens,
            "completion_tokens": seq.num_outputs,
        }  # fmt: skip
        LOG.debug("%s of request %s, attempt %d: %s; %d tokens of %d prompted, %d cached", record.kind.value,
                  request_id, record.attempt, outcome, seq.num_outputs, seq.prompt_tokens, seq.cached_tokens,
                  extra=told)  # fmt: skip

    def _close_step(self) -> bool:
        for message in reports.kv_events(self.tree):
            self.outbox.say(message)
        if self.draining and not self._drained and not len(self.ledger) and not self._intake.holds_any:
            self._drained = True
            self.outbox.say(messages.Drained())
        return self.outbox.close_step()
