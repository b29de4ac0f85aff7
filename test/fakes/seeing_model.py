"""A chat model that can see, as far as a gateway is concerned: its prompt has 16 placeholders for each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tiny_chat_tokenizer import END, START

from vla_cloud.core.generate import ImageSpan
from vla_cloud.gateway.images import ImageIntake

IMAGE_TOKENS = 16
PLACEHOLDER = 900


class SeeingModel:
    """``seen``: mean colour and shape of every image, as the template step got it."""

    def __init__(self, intake: ImageIntake) -> None:
        self.intake = intake
        self.seen: list[tuple[tuple[int, ...], list[int]]] = []
        self.held: list[int] = []

    def prompt(self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        self.held.append(self.intake.held_pixels)
        tokens: list[int] = []
        spans: list[ImageSpan] = []
        for message in messages:
            tokens += [START, *f"{message['role']}\n".encode()]
            for part in message["content"]:
                if part["type"] == "text":
                    tokens += part["text"].encode()
                    continue
                image = images[len(spans)]
                self.seen.append((image.pixels.shape, np.round(image.pixels.mean(axis=(0, 1))).astype(int).tolist()))
                spans.append(ImageSpan(len(tokens), IMAGE_TOKENS, image.sha256))
                tokens += [PLACEHOLDER] * IMAGE_TOKENS
            tokens += [END, ord("\n")]
        return [*tokens, START, *b"assistant\n"], tuple(spans)
