"""What the worker has to tell the gateway, in the order in which it may be told: tokens before the end they lead to."""

from __future__ import annotations

from vla_cloud.core.sequence import TokenSequence
from vla_cloud.core.step_plan import Finished
from vla_cloud.engine.runner import Sampled
from vla_cloud.engine.work_ledger import Kind, WorkLedger
from vla_cloud.pools import messages
from vla_cloud.pools.messages import ToGateway


class Outbox:
    """Messages since the last ``take``. The tokens of one step, of all requests, are one message."""

    def __init__(self, ledger: WorkLedger) -> None:
        """Empty. The ledger knows which attempt a sequence belongs to."""
        self._ledger = ledger
        self._messages: list[ToGateway] = []
        self._rows: list[messages.TokenRow] = []

    def say(self, message: ToGateway) -> None:
        """Add a message."""
        self._messages.append(message)

    def token(self, seq: TokenSequence, position: int, sampled: Sampled) -> None:
        """Add a token of a request that decodes here; of others (role prefill) D tells it."""
        record = self._ledger.get(seq.request_id)
        if record is None or record.kind is Kind.PREFILL:
            return
        asked = seq.request.sampling.logprobs is not None
        logprobs = [sampled.logprob] if asked and sampled.logprob is not None else []
        top = [list(sampled.top_logprobs)] if asked else []
        row = messages.TokenRow(record.request_id, record.attempt, position, [sampled.token_id], logprobs, top)
        self._rows.append(row)

    def end(self, finished: Finished) -> None:
        """Add the final message of an attempt, after its tokens; nothing if it was told already."""
        self.close_step()
        message = self._ledger.close(finished)
        if message is not None:
            self._messages.append(message)

    def close_step(self) -> bool:
        """The tokens so far make one message; whether there is anything to take."""
        if self._rows:
            self._messages.append(messages.Tokens(self._rows))
            self._rows = []
        return bool(self._messages)

    def take(self) -> list[ToGateway]:
        """All messages, in order."""
        taken, self._messages = self._messages, []
        return taken
