"""P's half of a disaggregated request: which blocks go to D when, and how each transfer ends.

The engine calls ``begin_step``, ``on_layer`` (from inside the forward pass) and ``end_step`` around each step, then
``finish`` for each prompt that is done. A transfer ends once: with Pushed, with a failure, or stopped by the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from vla_cloud.core.block_pool import BLOCK_TOKENS, blocks_for
from vla_cloud.core.generate import InvalidRequest, TransferFailed
from vla_cloud.core.scheduler import Scheduler
from vla_cloud.core.sequence import TokenSequence
from vla_cloud.core.step_plan import Chunk
from vla_cloud.core.transfer_plan import Bandwidth, Push, PushPlan, TransferConfig, choose_layerwise
from vla_cloud.engine.first_token import FirstToken, encode
from vla_cloud.engine.runner import Sampled
from vla_cloud.engine.totals import Totals
from vla_cloud.engine.work_ledger import WorkLedger
from vla_cloud.kv_transfer.connector import Cause, Failed, KvSender, Pushed
from vla_cloud.kv_transfer.layout import KvLayout
from vla_cloud.pools.messages import Destination
from vla_common.clock import NS_PER_S, Clock

LOG = logging.getLogger(__name__)

_MAX_RECEIVERS = 256  # whose bandwidth is remembered: restarted workers come under new names
_CODE_OF_CAUSE = {Cause.LAYOUT: "FAILED_PRECONDITION", Cause.DEADLINE: "DEADLINE_EXCEEDED"}


@dataclass(slots=True)
class _Transfer:
    seq: TokenSequence
    destination: Destination
    plan: PushPlan | None = None  # made when the cached prefix is known, at the first chunk
    chunk_end: int = 0  # of the running step
    pushed_in_step: bool = False
    computed_ns: int = 0  # when the prompt was
    deadline_ns: int | None = None  # from then on
    broken: str = ""  # a call of the sender raised; its poll() may tell why


def push_failed(code: str, text: str) -> TransferFailed:
    """A TransferFailed of this code (a gRPC status name)."""
    error = TransferFailed(text)
    error.code = code
    return error


class PrefillSide:
    """All pushes of one P worker, over a KvSender."""

    def __init__(
        self,
        sender: KvSender,
        layout: KvLayout,
        scheduler: Scheduler,
        ledger: WorkLedger,
        config: TransferConfig,
        clock: Clock,
        totals: Totals | None = None,
    ) -> None:
        """Nothing under way."""
        self.sender = sender
        self._scheduler = scheduler
        self._ledger = ledger
        self._bandwidths: dict[str, Bandwidth] = {}  # by receiver, the one used last at the end
        self._layout = layout
        self._config = config
        self._clock = clock
        self._totals = totals if totals is not None else Totals()
        self._by_key: dict[str, _Transfer] = {}
        self._by_token: dict[str, str] = {}
        self._step: list[_Transfer] = []

    def __len__(self) -> int:
        """Transfers that have not ended."""
        return len(self._by_key)

    def check(self, prompt_tokens: int, destination: Destination) -> None:
        """Raise InvalidRequest for a destination that cannot take this prompt."""
        wanted = blocks_for(prompt_tokens) - destination.first_block
        if wanted < 1 or len(destination.blocks) != wanted or len(set(destination.blocks)) != wanted:
            raise InvalidRequest(
                f"{len(destination.blocks)} reserved blocks from block {destination.first_block} on do not take a"
                f" prompt of {prompt_tokens} tokens: reserve {max(wanted, 1)} distinct ones"
            )
        if destination.token in self._by_token:
            raise InvalidRequest(f"transfer token {destination.token!r} is in use: reserve anew")

    def begin(self, seq: TokenSequence, destination: Destination) -> None:
        """The prompt is queued: ask D for its grant now, so that a D that is gone is known before the work is done.

        Raises TransferFailed if the sender will not.
        """
        deadline_ns = seq.request.deadline_ns
        assert deadline_ns is not None
        try:
            self.sender.open(destination.token, destination.address, deadline_ns)
        except (ValueError, RuntimeError, OSError) as error:
            raise push_failed("UNAVAILABLE", f"no transfer to {destination.worker}: {error}") from error
        self._by_key[seq.request_id] = _Transfer(seq, destination)
        self._by_token[destination.token] = seq.request_id

    def begin_step(self, chunks: Iterable[Chunk]) -> bool:
        """A step with these chunks is about to run; True if it wants ``on_layer`` calls."""
        self._step = []
        for chunk in chunks:
            transfer = self._by_key.get(chunk.seq.request_id)
            if transfer is None:
                continue
            transfer.chunk_end = chunk.start + chunk.count
            transfer.pushed_in_step = False
            if transfer.plan is None:
                transfer.plan = self._plan(transfer)
            if transfer.plan.layerwise:
                # Blocks of the tree are complete now; before a later chunk this finds nothing to push.
                self._push(transfer, transfer.plan.at_start())
                self._step.append(transfer)
        return bool(self._step)

    def on_layer(self, layer: int) -> None:
        """Layer ``layer`` of the running step is in the pool. Never raises: a transfer's fault is not the model's."""
        for transfer in self._step:
            if transfer.plan is not None and not transfer.broken and self._is_live(transfer):
                self._push(transfer, transfer.plan.after_layer(layer, transfer.chunk_end), in_step=True)

    def end_step(self) -> list[str]:
        """The step is over; keys of those of whose chunk something was pushed while it ran."""
        step, self._step = self._step, []
        return [transfer.seq.request_id for transfer in step if transfer.pushed_in_step]

    def finish(self, seq: TokenSequence, sampled: Sampled) -> None:
        """The prompt is computed: push what is left, then the notice with the first token."""
        transfer = self._by_key.get(seq.request_id)
        if transfer is None:
            return
        assert transfer.plan is not None and seq.request.deadline_ns is not None
        destination = transfer.destination
        num_bytes = len(destination.blocks) * self._layout.block_bytes
        allowed_ns = self._bandwidth(destination.worker).allowed_ns(num_bytes)
        transfer.computed_ns = self._clock.monotonic_ns()
        limit_ns = transfer.computed_ns + min(allowed_ns, round(destination.deadline_s * NS_PER_S))
        transfer.deadline_ns = min(limit_ns, seq.request.deadline_ns)
        self._push(transfer, transfer.plan.after_chunk(seq.prompt_tokens))
        first = FirstToken(
            destination.epoch,
            seq.prompt_tokens,
            sampled.token_id,
            seq.cached_tokens,
            sampled.logprob,
            sampled.top_logprobs,
        )
        if not transfer.broken:
            try:
                self.sender.finish(destination.token, encode(first))
            except (ValueError, RuntimeError, OSError) as error:
                transfer.broken = str(error)

    def stop(self, key: str) -> None:
        """When this returns nothing more is written for the request and none of its blocks is read."""
        transfer = self._by_key.pop(key, None)
        if transfer is not None:
            del self._by_token[transfer.destination.token]
            self.sender.abort(transfer.destination.token)

    def look(self) -> None:
        """Let the scheduler know of transfers that have ended: all pushed, or failed. Late events are ignored."""
        for event in self.sender.poll():
            key = self._by_token.pop(event.token, None)
            if key is None:
                continue
            transfer = self._by_key.pop(key)
            if isinstance(event, Failed):
                self._totals.transfer_failed(event.cause.value)
                code = _CODE_OF_CAUSE.get(event.cause, "UNAVAILABLE")
                self._scheduler.abort(key, push_failed(code, f"{event.cause.value}: {event.detail}"))
            else:
                self._pushed(key, transfer, event)
        now_ns = self._clock.monotonic_ns()
        for key, transfer in list(self._by_key.items()):
            if transfer.broken:
                cause = "stuck"
                error = push_failed("INTERNAL", f"the push could not go on: {transfer.broken}")
            elif transfer.deadline_ns is not None and now_ns >= transfer.deadline_ns:
                cause = "late"
                text = f"the push to {transfer.destination.worker} was not done in time"
                error = push_failed("DEADLINE_EXCEEDED", text)
                self._was_late(transfer, now_ns)
            else:
                continue
            self._totals.transfer_failed(cause)
            self.stop(key)
            self._scheduler.abort(key, error)

    def next_ns(self) -> int | None:
        """When the earliest push deadline is over."""
        return min((t.deadline_ns for t in self._by_key.values() if t.deadline_ns is not None), default=None)

    def close(self) -> None:
        """Nothing more is written by this worker."""
        self._by_key.clear()
        self._by_token.clear()
        self.sender.close()

    def _pushed(self, key: str, transfer: _Transfer, event: Pushed) -> None:
        self._totals.transferred(event.num_bytes, event.elapsed_ns)
        record = self._ledger.get(key)
        if record is not None:
            record.pushed_bytes = event.num_bytes
        # Layer by layer the time is that of the computation, not of the link.
        if transfer.plan is not None and not transfer.plan.layerwise:
            self._bandwidth(transfer.destination.worker).measured(event.num_bytes, event.elapsed_ns)
        self._scheduler.pushed(key)

    def _was_late(self, transfer: _Transfer, now_ns: int) -> None:
        """Else a link that has become slow would cut off every transfer to come."""
        num_bytes = len(transfer.destination.blocks) * self._layout.block_bytes
        self._bandwidth(transfer.destination.worker).timed_out(num_bytes, now_ns - transfer.computed_ns)

    def _bandwidth(self, worker: str) -> Bandwidth:
        known = self._bandwidths.pop(worker, None)
        self._bandwidths[worker] = known if known is not None else Bandwidth(self._config)
        if len(self._bandwidths) > _MAX_RECEIVERS:
            del self._bandwidths[next(iter(self._bandwidths))]
        return self._bandwidths[worker]

    def _plan(self, transfer: _Transfer) -> PushPlan:
        seq = transfer.seq
        return PushPlan(
            layers=self._layout.layers,
            block_size=BLOCK_TOKENS,
            total_tokens=seq.prompt_tokens,
            cached_tokens=seq.cached_tokens,
            held_tokens=transfer.destination.first_block * BLOCK_TOKENS,
            layerwise=choose_layerwise(self._config, seq.prompt_tokens - seq.cached_tokens),
        )

    def _is_live(self, transfer: _Transfer) -> bool:
        return self._by_key.get(transfer.seq.request_id) is transfer

    def _push(self, transfer: _Transfer, pushes: Iterable[Push], in_step: bool = False) -> None:
        first = transfer.destination.first_block
        for push in pushes:
            blocks = push.blocks
            local = transfer.seq.table[blocks.start : blocks.stop]
            remote = transfer.destination.blocks[blocks.start - first : blocks.stop - first]
            try:
                self.sender.push(transfer.destination.token, push.layers, local, remote)
            except (ValueError, RuntimeError, OSError) as error:
                LOG.info("push of %s: %s", transfer.seq.request_id, error)
                transfer.broken = str(error)
                return
            transfer.pushed_in_step |= in_step
