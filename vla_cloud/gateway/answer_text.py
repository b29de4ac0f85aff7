"""Tokens of one answer to text, up to EOS or a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vla_cloud.core.generate import FinishReason
from vla_cloud.core.stop_strings import StopStrings
from vla_cloud.gateway.chat_types import ChatRequest, Done, TextDelta, TokenLogprob, Usage
from vla_cloud.pools.events import Finished, TokenEvent


class Stream(Protocol):
    """Text of a growing answer; see vla_cloud.engine.tokenizer.TextStream."""

    def push(self, token: int) -> str:
        """The text that this token completes."""
        ...

    def finish(self) -> str:
        """What is held back."""
        ...


class Tokenizer(Protocol):
    """The part of ChatTokenizer that a door needs."""

    eos_token_ids: frozenset[int]

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation (``options`` go to its template); InvalidRequest if the template refuses it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def stream(self, prompt: Sequence[int] = ()) -> Stream:
        """The text of an answer, as it grows."""
        ...


class AnswerText:
    """Feed it the events of the service."""

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """``prompt``: the whole one, in tokens."""
        self._tokenizer = tokenizer
        self._text = tokenizer.stream(prompt)
        self._stops = StopStrings(request.stop)
        self._prompt_tokens = len(prompt)
        self._count = 0
        self._has_ended = False  # at EOS: the service ends it, too
        self._tokens: list[int] = []  # not given yet
        self._logprobs: list[TokenLogprob] = []
        self._ready = 0  # of those, how many have text that is out (the last of them perhaps only in part)

    @property
    def stop_string(self) -> str | None:
        """The one that was found."""
        return self._stops.matched

    def take(self, event: TokenEvent) -> TextDelta | None:
        """What can be given now. Tokens behind the end do not count."""
        text = ""
        for index, token in enumerate(event.tokens):
            if self._has_ended or self.stop_string is not None:
                break
            self._count += 1
            if token in self._tokenizer.eos_token_ids:
                self._has_ended = True
                break
            self._tokens.append(token)
            if event.logprobs:
                self._logprobs.append(self._logprob(event, index))
            new = self._stops.push(self._text.push(token))
            if new:
                text += new
                self._ready = len(self._tokens)
        return self._delta(text) if text else None

    def end(self, finished: Finished) -> tuple[TextDelta | None, Done]:
        """What was held back, and the end that the service names."""
        text = self._stops.push(self._text.finish())
        reason = "stop" if finished.reason is FinishReason.STOP or self.stop_string is not None else "length"
        if self.stop_string is None:
            text += self._stops.finish()
            self._ready = len(self._tokens)
        usage = Usage(self._prompt_tokens, finished.generated_tokens, finished.cached_tokens)
        return self._delta(text), Done(reason, usage, self.stop_string)

    def stopped(self) -> Done:
        """The end at a stop string."""
        return Done("stop", Usage(self._prompt_tokens, self._count, None), self.stop_string)

    def _delta(self, text: str) -> TextDelta | None:
        if not text and not self._ready:
            return None
        ready, self._ready = self._ready, 0
        delta = TextDelta(text, tuple(self._tokens[:ready]), tuple(self._logprobs[:ready]))
        del self._tokens[:ready], self._logprobs[:ready]
        return delta

    def _logprob(self, event: TokenEvent, index: int) -> TokenLogprob:
        top = event.top_logprobs[index] if event.top_logprobs else ()
        decode = self._tokenizer.decode
        return TokenLogprob(
            event.tokens[index], decode([event.tokens[index]]), event.logprobs[index],
            tuple((token, decode([token]), logprob) for token, logprob in top),
        )  # fmt: skip
