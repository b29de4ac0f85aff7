"""What a worker tells of itself: its load, and the changes of its prefix tree."""

from __future__ import annotations

from vla_cloud.core.radix_tree import RadixTree
from vla_cloud.core.scheduler import Scheduler
from vla_cloud.core.sequence import SequenceState
from vla_cloud.engine.decode_side import DecodeSide
from vla_cloud.engine.totals import Totals
from vla_cloud.engine.work_ledger import WorkLedger
from vla_cloud.pools.messages import KvEventRow, KvEvents, Load

_MAX_ROWS = 65536


def load(scheduler: Scheduler, ledger: WorkLedger, totals: Totals, decode_side: DecodeSide | None = None) -> Load:
    """For Pong. Every accepted attempt counts, waiting or running, whichever way it came in."""
    now = scheduler.load()
    held = sum(record.seq.computed for record in ledger if record.seq.state is SequenceState.RUNNING)
    return Load(
        total_blocks=now.total_blocks,
        free_blocks=now.free_blocks + now.cached_blocks,
        quarantined_blocks=now.quarantined_blocks,
        active_tokens=now.tokens_to_compute + held,
        running=now.running + now.reserved + now.to_push,
        waiting=now.waiting + now.preempted,
        cached_blocks=now.cached_blocks,
        reserved=now.reserved,
        to_push=now.to_push,
        preempted=now.preempted,
        leases=0 if decode_side is None else len(decode_side),
        awaited_writers=0 if decode_side is None else decode_side.quarantines,
        preemptions=now.preemptions,
        leases_expired=totals.leases_expired,
        computed_tokens=totals.computed_tokens,
        cached_tokens=totals.cached_tokens,
        transfers=totals.transfers,
        transfer_bytes=totals.transfer_bytes,
        transfer_s=totals.transfer_s,
        transfer_failures=dict(totals.transfer_failures),
    )


def kv_events(tree: RadixTree) -> list[KvEvents]:
    """Changes since the last call."""
    events = tree.drain_events()
    parts = [events[at : at + _MAX_ROWS] for at in range(0, len(events), _MAX_ROWS)]
    return [
        KvEvents(part[0].sequence, [KvEventRow(one.change, one.block_hash, one.parent_hash) for one in part])
        for part in parts
    ]
