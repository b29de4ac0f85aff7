"""What the chat layer asks of a model: a service that computes, what reads and writes its text, and perhaps eyes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from vla_cloud.core.generate import GenerateRequest, ImageSpan
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.gateway.answer_text import Tokenizer
from vla_cloud.gateway.chat_types import ImagePart, SamplingDefaults
from vla_cloud.pools.events import Finished, TokenEvent

Prompt = tuple[list[int], tuple[ImageSpan, ...]]
"""Tokens, and which of them stand for images."""


class Service(Protocol):
    """The part of ServingService that a door needs."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Finished]:
        """TokenEvents, then Finished, or a RequestError. An async generator: closing it aborts the request."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request; False if it is not being served."""
        ...

    def health(self) -> dict[str, Any]:
        """At least ``serving`` and ``draining``."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those under way."""
        ...


class Intake(Protocol):
    """See :class:`vla_cloud.gateway.images.ImageIntake`."""

    def taken(self, parts: Sequence[ImagePart]) -> AbstractAsyncContextManager[list[Any]]:
        """Checked and decoded images (DecodedImage: RGB u8[height, width, 3] and SHA-256), or a RequestError."""
        ...

    def close(self) -> None:
        """End its threads."""
        ...


class Vision(Protocol):
    """What a model that can see brings along."""

    intake: Intake

    def prompt(self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> Prompt:
        """The chat template with images; called in a thread. InvalidRequest if it refuses the messages.

        A message's ``content`` is a list of ``{"type": "text", "text": ...}`` and ``{"type": "image"}``, the images in
        the order of ``images`` (DecodedImage), whose pixels are given up after the call.
        """
        ...


class Checker(Protocol):
    """Finds out whether grammars can be served; see vla_cloud.gateway.grammar_checker.GrammarChecker."""

    async def check(self, grammar: Grammar) -> None:
        """Return, or raise a RequestError."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """A name that clients use, what reads and writes its text, and what computes it.

    ``vision`` None: the model cannot see; images are refused before a byte of them is fetched or decoded.
    ``grammars`` None: requests with a grammar are refused.
    """

    name: str
    tokenizer: Tokenizer
    service: Service
    vision: Vision | None = None
    grammars: Checker | None = None
    defaults: SamplingDefaults = SamplingDefaults()
