"""Builds the plan of one step: decode rows first, then who may come in, then prompt chunks from a shared budget."""

from __future__ import annotations

from vla_cloud.core.block_ledger import BlockLedger
from vla_cloud.core.block_pool import BLOCK_TOKENS, blocks_for
from vla_cloud.core.chunk_budget import share_budget
from vla_cloud.core.generate import Priority
from vla_cloud.core.live_sequences import LiveSequences
from vla_cloud.core.preemption import SwapCost, choose_victim
from vla_cloud.core.sequence import SequenceState, TokenSequence
from vla_cloud.core.step_plan import Chunk, Role, SchedulerConfig, StepPlan, SwapIn, SwapOut

# Waiting sequences per step whose prefix is looked up although they may not fit: bounds the work of a step.
_MAX_LOOKUPS = 8


class StepPlanner:
    """Moves sequences between waiting and running while it fills a StepPlan."""

    def __init__(self, config: SchedulerConfig, ledger: BlockLedger, live: LiveSequences) -> None:
        """The scheduler shares its ledger and sequences."""
        self._config = config
        self._ledger = ledger
        self._live = live
        self._cost = SwapCost(
            config.host_blocks, config.bytes_per_block, config.host_bandwidth_bytes_s, config.prefill_tokens_s
        )
        self.host_used = 0  # host blocks that hold KV of preempted sequences
        self.preemptions = 0
        self._lookups = 0
        self._slots = self._long_slots = 0

    def fill(self, plan: StepPlan) -> None:
        """Decide everything of a step but ``finished``."""
        self._lookups = _MAX_LOOKUPS
        self._slots = self._config.max_partial_prefills
        self._long_slots = self._config.max_long_prefills
        self._schedule_decode(plan)
        for seq in self._live.running():
            self._use_slot(seq)
        self._admit(plan)
        self._schedule_prefill(plan)

    def forget_host_copy(self, seq: TokenSequence) -> None:
        """The host copy of a sequence is dropped."""
        self.host_used -= blocks_for(seq.swapped_tokens)
        seq.swapped_tokens = 0

    def _schedule_decode(self, plan: StepPlan) -> None:
        rows = sorted((seq for seq in self._live.running() if seq.decoding), key=lambda seq: seq.rank)
        for seq in rows:
            if len(plan.decode) == self._config.max_running:
                break
            # The victim comes last in order of service, so it is never one that has a row already.
            while seq.state is SequenceState.RUNNING and not self._ledger.grow(seq):
                victim = choose_victim(self._live.running())
                assert victim is not None  # seq itself is running
                self._preempt(victim, plan)
            if seq.state is SequenceState.RUNNING:
                plan.decode.append(seq)

    def _preempt(self, victim: TokenSequence, plan: StepPlan) -> None:
        swap = self._cost.prefers_swap(victim.computed, self.host_used)
        if swap:
            blocks = blocks_for(victim.computed)
            plan.swap_out.append(SwapOut(victim, tuple(victim.table[:blocks])))
            victim.swapped_tokens = victim.computed
            self.host_used += blocks
        # A copy on the host needs no place in the tree; KV that would be computed again may still be found there.
        self._ledger.release(victim, keep=not swap)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        self._live.move(victim, SequenceState.PREEMPTED)
        plan.preempted.append(victim)
        if victim in plan.decode:
            plan.decode.remove(victim)

    def _admit(self, plan: StepPlan) -> None:
        passed: list[TokenSequence] = []
        robots_only = False
        patience = self._config.max_bypass  # how many may still go ahead of one that was passed
        for seq in self._live.waiting():
            # Whoever gave way in this step waits for the next, and nobody after it takes what it gave.
            if seq in plan.preempted or (passed and patience <= 0):
                break
            robot = seq.priority is Priority.ROBOT
            # Room that a preemption made, or that a robot waits for, is not for chat to take in the same step.
            if not robot and (robots_only or plan.preempted or self._live.holding >= self._config.max_admitted):
                break
            if not robot and not self._prefill_slot(seq):
                if seq.state is SequenceState.PREEMPTED:
                    break  # resume first
                continue
            if self._come_in(seq, plan) or (robot and self._make_room(seq, plan)):
                patience -= 1
                for other in passed:
                    other.bypassed += 1
            elif seq.state is SequenceState.PREEMPTED:
                break
            else:
                patience = min(patience if passed else self._config.max_bypass, self._config.max_bypass - seq.bypassed)
                passed.append(seq)
                robots_only |= robot

    def _prefill_slot(self, seq: TokenSequence) -> bool:
        """Whether one more prompt like this may be in progress. Long ones leave a slot to short ones."""
        config = self._config
        if self._is_reserving(seq):
            return True  # computed elsewhere
        if seq.num_outputs and seq.swapped_tokens + 1 == len(seq.tokens):
            return True  # its host copy lets it go on decoding
        if self._slots <= 0:
            return False
        if self._long_slots > 0 or len(seq.tokens) <= config.long_prefill_tokens:
            return True
        return self._may_look_up() and self._ledger.uncached(seq) <= config.long_prefill_tokens

    def _is_reserving(self, seq: TokenSequence) -> bool:
        return self._config.role is Role.DECODE and seq.state is SequenceState.WAITING and not seq.local

    def _use_slot(self, seq: TokenSequence) -> None:
        if not seq.decoding:
            self._slots -= 1
            self._long_slots -= seq.remaining > self._config.long_prefill_tokens

    def _may_look_up(self) -> bool:
        self._lookups -= 1
        return self._lookups >= 0

    def _come_in(self, seq: TokenSequence, plan: StepPlan) -> bool:
        """Give a waiting sequence its blocks, all that its known tokens need, or leave it waiting."""
        robot = seq.priority is Priority.ROBOT
        spare = 0 if robot or not self._live.holding else self._config.watermark_blocks
        reserve = self._is_reserving(seq)
        num_tokens = len(seq.tokens) + reserve  # a reservation has room for the first token's KV as well
        if not self._ledger.surely_fits(num_tokens, spare) and not (robot or self._may_look_up()):
            return False
        if not self._ledger.occupy(seq, num_tokens, spare):
            return False
        if seq.preemptions == 0:
            seq.cached_tokens = seq.computed
        if seq.swapped_tokens:
            self._swap_in(seq, plan)
        self._live.move(seq, SequenceState.RESERVED if reserve else SequenceState.RUNNING)
        if reserve:
            plan.reserved.append(seq)
        else:
            self._use_slot(seq)
        return True

    def _swap_in(self, seq: TokenSequence, plan: StepPlan) -> None:
        found = seq.computed // BLOCK_TOKENS
        plan.swap_in.append(SwapIn(seq, tuple(seq.table[found : blocks_for(seq.swapped_tokens)]), found))
        seq.computed = max(seq.computed, seq.swapped_tokens)
        self.forget_host_copy(seq)

    def _make_room(self, robot: TokenSequence, plan: StepPlan) -> bool:
        """Preempt chat for a robot. Not on a prefill worker: a transfer may be reading the blocks of its prompts."""
        if self._config.role is Role.PREFILL:
            return False
        victims = [seq for seq in self._live.running() if seq.priority > robot.priority]
        need = blocks_for(len(robot.tokens) + 1)
        if need > self._ledger.available + sum(len(seq.table) for seq in victims):
            return False
        while (victim := choose_victim(self._live.running(), below=robot.priority)) is not None:
            self._preempt(victim, plan)
            if self._come_in(robot, plan):
                return True
        return False

    def _schedule_prefill(self, plan: StepPlan) -> None:
        partial = sorted((seq for seq in self._live.running() if not seq.decoding), key=lambda seq: seq.rank)
        robots = [seq for seq in partial if seq.priority is Priority.ROBOT]
        budget = self._config.chunk_tokens
        for group in (robots, [seq for seq in partial if seq.priority is not Priority.ROBOT]):
            for seq, count in zip(group, share_budget([seq.remaining for seq in group], budget), strict=True):
                if count:
                    plan.prefill.append(Chunk(seq, seq.computed, count, last=count == seq.remaining))
                    budget -= count
