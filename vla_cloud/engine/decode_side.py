"""D's half of a disaggregated request: reservations, leases, verified arrivals, and blocks a writer may still touch.

    queued ─▶ reserved ─▶ arrived (verified: blocks may be read)
       │          └─▶ ended without KV ─▶ quarantined ─▶ writer gone: blocks are free
       └─▶ ended: nothing was lent

The lease runs from the moment of queueing. After the end of a reservation every signal for it is late and ignored.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from vla_cloud.core.block_pool import BLOCK_TOKENS, BlockPool
from vla_cloud.core.generate import TransferFailed
from vla_cloud.core.kv_lease import LeaseConfig, LeaseTable
from vla_cloud.core.scheduler import Scheduler
from vla_cloud.core.sequence import TokenSequence
from vla_cloud.engine.first_token import decode
from vla_cloud.engine.outbox import Outbox
from vla_cloud.engine.totals import Totals
from vla_cloud.engine.work_ledger import WorkLedger
from vla_cloud.kv_transfer.connector import Arrived, Broken, KvReceiver, Reservation, WriterGone
from vla_cloud.pools.messages import Reserved
from vla_common.clock import NS_PER_S, Clock

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reservation:
    key: str
    seq: TokenSequence
    token: str
    epoch: int
    ended: bool = False  # the connector said so: there is nothing to cancel
    writer_gone: bool = False


class DecodeSide:
    """All reservations of one D worker, over a KvReceiver."""

    def __init__(
        self,
        receiver: KvReceiver,
        scheduler: Scheduler,
        pool: BlockPool,
        outbox: Outbox,
        ledger: WorkLedger,
        vocab_size: int,
        epoch: int,
        clock: Clock,
        totals: Totals | None = None,
    ) -> None:
        """Nothing reserved. ``epoch`` is this process's, which the notice must repeat."""
        self.receiver = receiver
        self.late = 0
        """Arrivals for reservations that had ended."""
        self._scheduler = scheduler
        self._pool = pool
        self._outbox = outbox
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._epoch = epoch
        self._uses = 0
        self._clock = clock
        self._totals = totals if totals is not None else Totals()
        self._leases = LeaseTable(LeaseConfig(), clock)
        self._queued: set[str] = set()
        self._by_key: dict[str, _Reservation] = {}
        self._by_token: dict[str, _Reservation] = {}
        self._quarantined: dict[str, str] = {}  # token -> writer

    @property
    def quarantines(self) -> int:
        """Transfers whose writers are awaited."""
        return len(self._quarantined)

    def __len__(self) -> int:
        """Leases that run."""
        return len(self._leases)

    def queue(self, key: str, lease_s: float) -> None:
        """A reservation waits for blocks; its lease begins."""
        self._leases.begin(key, lease_s)
        self._queued.add(key)

    def extend(self, key: str, lease_s: float) -> None:
        """A heartbeat; unknown and ended ones are ignored."""
        self._leases.heartbeat(key, lease_s)

    def lend(self, seq: TokenSequence) -> None:
        """Blocks were found: let a writer in, and tell the gateway where to."""
        key = seq.request_id
        record = self._ledger.get(key)
        if record is None:
            raise RuntimeError(f"{key} was reserved but never accepted")
        self._queued.discard(key)
        self._uses += 1
        reservation = _Reservation(key, seq, secrets.token_hex(16), self._uses)
        self._by_key[key] = reservation
        blocks = seq.lent_blocks
        try:
            self.receiver.expect(Reservation(reservation.token, tuple(blocks), reservation.epoch))
        except (ValueError, OSError) as error:
            reservation.ended = reservation.writer_gone = True
            self._scheduler.abort(key, TransferFailed(f"no KV can be received: {error}"))
            return
        self._by_token[reservation.token] = reservation
        first_block = seq.cached_tokens // BLOCK_TOKENS
        self._outbox.say(
            Reserved(record.request_id, record.attempt, reservation.token, first_block, blocks, seq.cached_tokens)
        )

    def look(self) -> None:
        """Let the scheduler know of KV that is verified, and of reservations that failed or outlived their lease.

        The blocks of the latter come back through :meth:`ended`.
        """
        for event in self.receiver.poll():
            if isinstance(event, WriterGone):
                self._acquit(event.token)
                continue
            reservation = self._by_token.pop(event.token, None)
            if reservation is None:
                self.late += 1
                continue
            reservation.ended = True
            reservation.writer_gone = not isinstance(event, Broken) or event.writer_gone
            if isinstance(event, Broken):
                self._totals.transfer_failed(event.cause.value)
                fault = f"{event.cause.value}: {event.detail}"
            else:
                self._totals.transferred(event.num_bytes, event.elapsed_ns)
                fault = self._take(reservation, event)
            if fault:
                self._scheduler.abort(reservation.key, TransferFailed(f"the KV cannot be used, {fault}"))
        for key in self._leases.sweep():
            self._totals.leases_expired += 1
            text = "the lease ended before the KV was here: send heartbeats, or prefill anew"
            self._scheduler.abort(key, TransferFailed(text))

    def ended(self, key: str, quarantined_writer: str | None) -> None:
        """The sequence has ended or runs on its own: no lease, no writer. Blocks in quarantine come back when safe."""
        self._leases.end(key)
        self._queued.discard(key)
        reservation = self._by_key.pop(key, None)
        if reservation is None:
            return
        self._by_token.pop(reservation.token, None)
        gone = reservation.writer_gone
        if not reservation.ended:
            gone = self.receiver.cancel(reservation.token)
        if quarantined_writer is None:
            return
        if gone:
            self._pool.acquit(quarantined_writer)
        else:
            self._quarantined[reservation.token] = quarantined_writer

    def next_ns(self) -> int | None:
        """When the earliest lease is over."""
        now_ns = self._clock.monotonic_ns()
        keys = (*self._queued, *self._by_key)
        return min((now_ns + round(self._leases.left_s(key) * NS_PER_S) for key in keys), default=None)

    def close(self) -> None:
        """Let nobody in any more."""
        self.receiver.close()

    def _take(self, reservation: _Reservation, event: Arrived) -> str:
        """The bytes are right; the notice must be as well before anything is read. What is wrong with it, or ""."""
        try:
            first = decode(event.payload)
        except ValueError as error:
            return f"its notice is not of this version: {error}"
        seq = reservation.seq
        if event.epoch != reservation.epoch or first.epoch != self._epoch:
            return f"its notice is of epoch {event.epoch}, {first.epoch}, not {reservation.epoch}, {self._epoch}"
        if first.prompt_tokens != seq.prompt_tokens or first.cached_tokens > seq.prompt_tokens:
            return f"it is of {first.prompt_tokens} tokens, the prompt has {seq.prompt_tokens}"
        if first.token >= self._vocab_size:
            return f"its first token is {first.token}, the vocabulary has {self._vocab_size}"
        record = self._ledger.get(reservation.key)
        if record is None or not self._scheduler.kv_arrived(reservation.key, first.token):
            self.late += 1  # aborted before the news came
            return ""
        record.cached_tokens = first.cached_tokens
        self.ended(reservation.key, None)
        self._outbox.token(seq, seq.prompt_tokens, first.sampled(reservation.key))
        return ""

    def _acquit(self, token: str) -> None:
        writer = self._quarantined.pop(token, None)
        if writer is not None:
            self._pool.acquit(writer)
