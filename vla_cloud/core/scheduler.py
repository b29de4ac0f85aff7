"""The scheduler of one worker: takes requests, plans steps, takes results, and sees that every request ends once.

One thread calls everything. Between plan() and commit() the engine runs the step; what is aborted meanwhile keeps its
blocks until commit(), everything else gives them back at once. A sequence that has ended is reported exactly once, in
``StepPlan.finished`` or ``StepResult.finished``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from vla_cloud.core.block_ledger import BlockLedger
from vla_cloud.core.block_pool import BLOCK_TOKENS, BlockPool
from vla_cloud.core.generate import (
    DeadlineExceeded,
    EngineFailed,
    FinishReason,
    GenerateRequest,
    RequestAborted,
    RequestError,
    check_request,
)
from vla_cloud.core.live_sequences import LiveSequences
from vla_cloud.core.radix_tree import RadixTree
from vla_cloud.core.sequence import SequenceState, TokenSequence
from vla_cloud.core.step_plan import Finished, Role, SchedulerConfig, StepPlan, StepResult
from vla_cloud.core.step_planner import StepPlanner
from vla_common.clock import Clock


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """What a worker tells its router and its metrics. Blocks are of 16 tokens."""

    waiting: int
    preempted: int
    reserved: int
    running: int
    to_push: int
    free_blocks: int
    cached_blocks: int  # evictable
    quarantined_blocks: int
    total_blocks: int
    tokens_to_compute: int  # prompt tokens known and not computed, waiting or running
    preemptions: int  # since the start


class Scheduler:
    """Continuous batching with chunked prefill over one block pool and one prefix tree."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, tree: RadixTree, clock: Clock) -> None:
        """The pool and the tree belong to this scheduler from now on; read their counts, change nothing."""
        self._config = config
        self._pool = pool
        self._tree = tree
        self._clock = clock
        self._ledger = BlockLedger(pool, tree, config.prefix_cache)
        self._live = LiveSequences(config.max_waiting)
        self._planner = StepPlanner(config, self._ledger, self._live)
        self._arrivals = itertools.count()
        self._finished: list[Finished] = []
        self._in_flight: StepPlan | None = None
        self._touched: set[str] = set()
        # A sequence alone in the pool must be able to finish, so the pool bounds the context as well.
        self.max_len = min(config.max_model_len, pool.total * BLOCK_TOKENS)

    def add(self, request: GenerateRequest, writer: str | None = None, local: bool = False) -> TokenSequence:
        """Let a request wait. Raises InvalidRequest, DuplicateRequest or QueueFull before any work.

        Role decode: plan() reserves blocks when there is room (``StepPlan.reserved``); ``writer`` (default: the request
        id) names who will fill them, unique for each attempt of a request. ``local``: its prompt is computed here.
        """
        check_request(request, self.max_len)
        seq = TokenSequence(request, next(self._arrivals), writer, local)
        self._live.enqueue(seq)
        return seq

    def get(self, request_id: str) -> TokenSequence | None:
        """The live sequence of a request, None once it has ended."""
        return self._live.get(request_id)

    @property
    def has_work(self) -> bool:
        """Whether plan() could bring anything now. Call it now and then all the same: reservations have deadlines."""
        idle = self._live.count(SequenceState.RESERVED) + self._live.count(SequenceState.TO_PUSH)
        return bool(self._finished) or len(self._live) > idle

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def abort(self, request_id: str, error: RequestError | None = None) -> bool:
        """End a request: by its client (ABORTED), or with ``error``. False if it is not alive, which is no fault.

        Blocks come back now, or at commit() if the running step uses them. Of a reservation they go into quarantine
        under its writer. Stop any push of the request *before* this call: its blocks may be used by the next step.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return False
        error = error if error is not None else RequestAborted(f"request {request_id} was aborted")
        if request_id in self._touched:
            seq.aborting = error
        else:
            self._end_with(seq, error)
        return True

    def kv_arrived(self, request_id: str, first_token: int) -> bool:
        """Role decode: the KV of the whole prompt is here and verified; decoding goes on from ``first_token``.

        False for a request that holds no reservation any more: a late signal, to be ignored.
        """
        seq = self._live.get(request_id)
        if seq is None or seq.state is not SequenceState.RESERVED:
            return False
        seq.computed = seq.prompt_tokens
        self._live.move(seq, SequenceState.RUNNING)
        self._ledger.publish(seq)
        self._take_token(seq, first_token)
        return True

    def pushed(self, request_id: str) -> bool:
        """Role prefill: the KV has left; the blocks go back. False if the request is not waiting for that."""
        seq = self._live.get(request_id)
        if seq is None or seq.state is not SequenceState.TO_PUSH:
            return False
        self._end(seq, FinishReason.PUSHED)
        return True

    def acquit(self, writer: str) -> int:
        """The writer of a quarantined reservation is known to write no more; returns the blocks freed."""
        return self._pool.acquit(writer)

    def plan(self) -> StepPlan:
        """The next step. Each plan that is not empty needs one commit() or discard() before the next plan()."""
        if self._in_flight is not None:
            raise RuntimeError("the last plan is still running: commit() or discard() it first")
        plan = StepPlan()
        self._expire()
        self._planner.fill(plan)
        plan.finished = self._drain()
        if not plan.empty:
            self._in_flight = plan
            chunks = [chunk.seq for chunk in plan.prefill]
            swapped = [swap.seq for swap in plan.swap_in]
            self._touched = {seq.request_id for seq in (*chunks, *plan.decode, *swapped)}
        return plan

    def commit(self, plan: StepPlan, sampled: Mapping[str, int]) -> StepResult:
        """The step has run. ``sampled`` has a token for each of ``plan.sampling()``, else ValueError."""
        self._require_in_flight(plan)
        for seq in plan.sampling():
            if seq.request_id not in sampled and seq.aborting is None:
                raise ValueError(f"no token was sampled for {seq.request_id}")
        result = StepResult()
        for chunk in plan.prefill:
            chunk.seq.computed += chunk.count
            self._ledger.publish(chunk.seq)
            if chunk.last and chunk.seq.aborting is None:
                self._prompt_done(chunk.seq, sampled, result)
        for seq in plan.decode:
            seq.computed += 1
            if seq.aborting is None:
                result.tokens.append((seq, sampled[seq.request_id]))
                self._take_token(seq, sampled[seq.request_id])
        self._land()
        result.finished = self._drain()
        return result

    def discard(self, plan: StepPlan, error: RequestError | None = None) -> list[Finished]:
        """The step failed: all it computed for end with ``error`` (EngineFailed), and nothing of it is kept."""
        self._require_in_flight(plan)
        error = error if error is not None else EngineFailed("the model runner failed: see the worker's log")
        for swap in plan.swap_out:
            if swap.seq.swapped_tokens:
                self._planner.forget_host_copy(swap.seq)  # perhaps never copied: compute it again
        for request_id in self._touched:
            seq = self._live.get(request_id)
            if seq is not None:
                self._end_with(seq, seq.aborting or error, keep=False)
        self._land()
        return self._drain()

    def load(self) -> SchedulerLoad:
        """A snapshot for routing and metrics."""
        live = self._live
        return SchedulerLoad(
            waiting=live.count(SequenceState.WAITING),
            preempted=live.count(SequenceState.PREEMPTED),
            reserved=live.count(SequenceState.RESERVED),
            running=live.count(SequenceState.RUNNING),
            to_push=live.count(SequenceState.TO_PUSH),
            free_blocks=self._pool.free,
            cached_blocks=self._tree.evictable,
            quarantined_blocks=self._pool.quarantined,
            total_blocks=self._pool.total,
            tokens_to_compute=sum(seq.remaining for seq in (*live.waiting(), *live.running()) if not seq.decoding),
            preemptions=self._planner.preemptions,
        )

    def _expire(self) -> None:
        """End what is past its deadline. What a sender reads (TO_PUSH) is left to the engine, which ends the push."""
        now_ns = self._clock.monotonic_ns()
        for seq in self._live:
            deadline_ns = seq.request.deadline_ns
            if deadline_ns is not None and now_ns >= deadline_ns and seq.state is not SequenceState.TO_PUSH:
                text = f"deadline passed while {seq.state.value} with {seq.num_outputs} tokens done: allow more time"
                self._end_with(seq, DeadlineExceeded(text))

    def _prompt_done(self, seq: TokenSequence, sampled: Mapping[str, int], result: StepResult) -> None:
        sampling = seq.request.sampling.max_new_tokens > 0
        if sampling:
            result.tokens.append((seq, sampled[seq.request_id]))
        if self._config.role is not Role.PREFILL:
            if sampling:
                self._take_token(seq, sampled[seq.request_id])
            else:
                self._end(seq, FinishReason.LENGTH)
            return
        if sampling:
            seq.tokens.append(sampled[seq.request_id])
            seq.finish_reason = self._stop_reason(seq)
        self._live.move(seq, SequenceState.TO_PUSH)
        result.to_push.append(seq)

    def _take_token(self, seq: TokenSequence, token: int) -> None:
        seq.tokens.append(token)
        reason = self._stop_reason(seq)
        if reason is not None:
            self._end(seq, reason)

    def _stop_reason(self, seq: TokenSequence) -> FinishReason | None:
        sampling = seq.request.sampling
        if seq.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        if seq.num_outputs >= sampling.max_new_tokens or len(seq.tokens) >= self.max_len:
            return FinishReason.LENGTH
        return None

    def _end_with(self, seq: TokenSequence, error: RequestError, keep: bool = True) -> None:
        aborted = isinstance(error, RequestAborted)
        self._end(seq, FinishReason.ABORTED if aborted else FinishReason.ERROR, error, keep)

    def _end(
        self, seq: TokenSequence, reason: FinishReason, error: RequestError | None = None, keep: bool = True
    ) -> None:
        """The one way out: blocks and host copy back, state FINISHED, reported once."""
        quarantined = seq.state is SequenceState.RESERVED
        if quarantined:
            self._ledger.quarantine(seq)
        else:
            self._ledger.release(seq, keep)
        if seq.swapped_tokens:
            self._planner.forget_host_copy(seq)
        seq.finish_reason = reason
        self._live.move(seq, SequenceState.FINISHED)
        self._finished.append(Finished(seq, reason, error, seq.writer if quarantined else None))

    def _land(self) -> None:
        """The step is over: what was aborted while it ran ends now."""
        touched, self._touched, self._in_flight = self._touched, set(), None
        for request_id in touched:
            seq = self._live.get(request_id)
            if seq is not None and seq.aborting is not None:
                self._end_with(seq, seq.aborting)

    def _require_in_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight and not (plan.empty and self._in_flight is None):
            raise ValueError("this is not the plan that is running: commit each plan once")

    def _drain(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        return finished
