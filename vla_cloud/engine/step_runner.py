"""Runs a plan's forward passes, and finds out whose fault it is when one raises.

A runner that raises without naming a request is run again with one request at a time: who raises alone is at fault
and ends by name, so that one request cannot take a worker (and the next, and the next) down. Computing a chunk twice
is harmless: it writes the same rows again. Nobody succeeding means that the worker is broken, not the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vla_cloud.core.generate import EngineFailed, InvalidRequest, RequestError
from vla_cloud.core.sequence import TokenSequence
from vla_cloud.core.step_plan import Chunk as PlannedChunk
from vla_cloud.core.step_plan import StepPlan
from vla_cloud.engine.grammars import Grammars
from vla_cloud.engine.runner import Batch, BatchError, Chunk, ModelRunner, OnLayer, Sampled, sampling_rule

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class StepOutcome:
    """``failed`` requests have been taken out of the plan; ``broken`` means that nothing of the step can be used."""

    sampled: dict[str, Sampled] = field(default_factory=dict)
    failed: dict[str, RequestError] = field(default_factory=dict)
    broken: BaseException | None = None
    retried: bool = False


class StepRunner:
    """One model runner and the way plans become batches."""

    def __init__(self, runner: ModelRunner, grammars: Grammars | None = None) -> None:
        """The runner is used by the engine's thread only."""
        self._runner = runner
        self._grammars = grammars

    def run(self, plan: StepPlan, on_layer: OnLayer | None) -> StepOutcome:
        """Compute the plan. Never raises for a fault of the model or of a request."""
        prefill = [_prefill_chunk(chunk) for chunk in plan.prefill]
        decode = [_decode_row(seq) for seq in plan.decode]
        outcome = StepOutcome()
        if self._grammars:  # there are sequences with a grammar
            prefill, decode = self._masked(plan, prefill, decode, outcome)
        while prefill or decode:
            try:
                outcome.sampled.update(_checked(self._runner.run(Batch(prefill, decode), on_layer), prefill, decode))
                return outcome
            except BatchError as error:
                # Nothing was written; the others can run.
                if not any(chunk.request_id == error.request_id for chunk in (*prefill, *decode)):
                    outcome.broken = error
                    return outcome
                outcome.failed[error.request_id] = InvalidRequest(str(error))
                prefill = [chunk for chunk in prefill if chunk.request_id != error.request_id]
                decode = [chunk for chunk in decode if chunk.request_id != error.request_id]
            except Exception as error:  # the model is foreign code, and every request must still end
                LOG.exception("the model runner raised")
                self._one_by_one(prefill, decode, error, outcome)
                return outcome
        return outcome

    def _masked(
        self, plan: StepPlan, prefill: list[Chunk], decode: list[Chunk], outcome: StepOutcome
    ) -> tuple[list[Chunk], list[Chunk]]:
        """With the tokens that grammars allow, without the requests that cannot go on."""
        assert self._grammars is not None
        masks, failed = self._grammars.masks(plan.sampling())
        outcome.failed.update(failed)

        def masked(chunks: list[Chunk]) -> list[Chunk]:
            return [
                replace(chunk, allowed=masks[chunk.request_id]) if chunk.request_id in masks else chunk
                for chunk in chunks if chunk.request_id not in failed
            ]  # fmt: skip

        return masked(prefill), masked(decode)

    def _one_by_one(
        self, prefill: Sequence[Chunk], decode: Sequence[Chunk], cause: Exception, outcome: StepOutcome
    ) -> None:
        outcome.retried = True
        singles = [Batch(prefill=[chunk]) for chunk in prefill] + [Batch(decode=[row]) for row in decode]
        if len(singles) == 1:
            outcome.broken = cause
            return
        errors: dict[str, RequestError] = {}
        for batch in singles:
            (chunk,) = (*batch.prefill, *batch.decode)
            try:
                outcome.sampled.update(_checked(self._runner.run(batch), batch.prefill, batch.decode))
            except Exception as error:
                errors[chunk.request_id] = EngineFailed(f"the model failed on this request: {error}")
        if len(errors) == len(singles):
            outcome.broken = cause
        outcome.failed.update(errors)


def take_out(plan: StepPlan, request_ids: set[str]) -> None:
    """Leave requests out of a plan that has run: nothing was computed for them."""
    plan.prefill[:] = [chunk for chunk in plan.prefill if chunk.seq.request_id not in request_ids]
    plan.decode[:] = [seq for seq in plan.decode if seq.request_id not in request_ids]


def _prefill_chunk(chunk: PlannedChunk) -> Chunk:
    seq = chunk.seq
    wanted = chunk.last and seq.request.sampling.max_new_tokens > 0
    rule = sampling_rule(seq.request) if wanted else None
    history = seq.tokens[: chunk.start] if rule is not None and rule.repetition_penalty != 1.0 else ()
    return Chunk(seq.request_id, chunk.token_ids, chunk.start, list(seq.table), rule, history)


def _decode_row(seq: TokenSequence) -> Chunk:
    rule = sampling_rule(seq.request)
    history = seq.tokens[: seq.computed] if rule.repetition_penalty != 1.0 else ()
    return Chunk(seq.request_id, seq.tokens[seq.computed :], seq.computed, list(seq.table), rule, history)


def _checked(sampled: Sequence[Sampled], prefill: Sequence[Chunk], decode: Sequence[Chunk]) -> dict[str, Sampled]:
    """By request; raises RuntimeError if the runner answered for other requests than it was asked for."""
    wanted = [chunk.request_id for chunk in (*prefill, *decode) if chunk.sampling is not None]
    found = [one.request_id for one in sampled]
    if found != wanted:
        raise RuntimeError(f"the runner sampled for {found} instead of {wanted}")
    return dict(zip(found, sampled, strict=True))
