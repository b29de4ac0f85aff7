"""What a worker has accepted and not ended yet, and the words of each end: one final message per attempt, never two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import get_args

from vla_cloud.core.generate import FinishReason, GenerateRequest, InvalidRequest, RequestError, TransferFailed
from vla_cloud.core.sequence import TokenSequence
from vla_cloud.core.step_plan import Finished
from vla_cloud.pools import messages
from vla_cloud.pools.codec import MessageError, unpack_tokens
from vla_cloud.pools.message_parts import Reason
from vla_cloud.pools.messages import Code, ToGateway, Work
from vla_common.clock import NS_PER_S

_CODES = frozenset(get_args(Code))
_MAX_TEXT = 4096


class Kind(Enum):
    """Which message asked for the work."""

    RESERVE = "reserve"
    PREFILL = "prefill"
    GENERATE = "generate"


@dataclass(slots=True)
class Record:
    """One attempt of one request. ``cached_tokens`` and ``pushed_bytes`` are told at the end."""

    key: str
    request_id: str
    attempt: int
    kind: Kind
    seq: TokenSequence
    cached_tokens: int = 0
    pushed_bytes: int = 0


class WorkLedger:
    """The records by key. A key names an attempt, so that two attempts of a request never share anything."""

    def __init__(self) -> None:
        """Empty."""
        self._records: dict[str, Record] = {}

    def __len__(self) -> int:
        """Attempts that have not ended."""
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """A copy, in order of acceptance."""
        return iter(list(self._records.values()))

    def get(self, key: str) -> Record | None:
        """The record, None once it has ended."""
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """Accepted."""
        self._records[record.key] = record

    def close(self, finished: Finished) -> ToGateway | None:
        """The final message, None if it was sent already."""
        record = self._records.pop(finished.request_id, None)
        return None if record is None else _final(record, finished)

    def fail(self, record: Record, error: RequestError) -> ToGateway:
        """The final message of an attempt whose sequence is lost with the engine."""
        del self._records[record.key]
        return _final(record, Finished(record.seq, FinishReason.ERROR, error))


def key_of(request_id: str, attempt: int) -> str:
    """Name of an attempt inside one worker. Request ids may hold any character, so the number stands first."""
    return f"{attempt}:{request_id}"


def to_request(key: str, work: Work, now_ns: int, deadline_ns: int | None = None) -> GenerateRequest:
    """The scheduler's request; ``deadline_ns`` if it was known before now.

    Raises:
        InvalidRequest: what no gateway of this project sends.
    """
    try:
        tokens = tuple(unpack_tokens(work.prompt))
    except MessageError as error:
        raise InvalidRequest(str(error)) from error
    if work.sampling.seed is None:
        raise InvalidRequest("work without a seed: its tokens would differ from attempt to attempt")
    return GenerateRequest(
        key,
        tokens,
        work.sampling,
        work.priority,
        tuple(work.images),
        work.salt,
        now_ns + round(work.time_left_s * NS_PER_S) if deadline_ns is None else deadline_ns,
        answered=work.streamed,
        grammar=work.grammar,
    )


def code_of(error: RequestError) -> Code:
    """The error's code; INTERNAL for one that the messages do not know."""
    return error.code if error.code in _CODES else "INTERNAL"  # type: ignore[return-value]


def text_of(error: BaseException) -> str:
    """What to tell, within the bounds of a message."""
    return (str(error) or type(error).__name__)[:_MAX_TEXT]


def refused(request_id: str, attempt: int, error: RequestError, retry_after_s: float) -> messages.Refused:
    """Nothing was begun; waiting helps only against a full queue."""
    wait_s = retry_after_s if error.code == "RESOURCE_EXHAUSTED" else 0.0
    return messages.Refused(request_id, attempt, code_of(error), text_of(error), wait_s)


def _final(record: Record, finished: Finished) -> ToGateway:
    request_id, attempt, error = record.request_id, record.attempt, finished.error
    if finished.reason is FinishReason.ABORTED:
        return messages.Aborted(request_id, attempt)
    if error is not None:
        transfer = isinstance(error, TransferFailed)
        if record.kind is Kind.PREFILL and transfer:
            return messages.PushFailed(request_id, attempt, code_of(error), text_of(error))
        return messages.Error(code_of(error), text_of(error), request_id, attempt, transfer)
    if finished.reason is FinishReason.PUSHED:
        return messages.Prefilled(request_id, attempt, record.seq.cached_tokens, record.pushed_bytes)
    seq = record.seq
    cached = record.cached_tokens if record.kind is Kind.RESERVE else seq.cached_tokens
    reason: Reason = "stop" if finished.reason is FinishReason.STOP else "length"
    return messages.Finished(request_id, attempt, reason, seq.num_outputs, cached, seq.preemptions)
