"""Observations in, context tokens out: stage 4 (prefill) and stage 7 (context projector) for a batch of robots.

The instruction's keys and values come from the prefix cache, the image's tokens from the image cache; only what is not
there is computed. The image tokens and readout queries of all robots of a batch then run in one forward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vla_cloud.context.checks import CheckedObservation, ObservationChecks
from vla_cloud.context.images import decode_jpeg
from vla_cloud.core.image_cache import ImageCache
from vla_cloud.core.prefix_cache import Match, PrefixCache
from vla_common.manifest import Manifest
from vla_models.vlm import Vlm

IMAGE_CACHE = 64


@dataclass(frozen=True)
class PreparedObservation:
    """A checked observation: text ids (the policy's fixed length) and pixels u8[H, W, 3].

    ``image_key`` is the SHA-256 of the JPEG (None: the image is not cached). ``image_tokens`` f[M, d] are what the
    cache holds of it; then nobody reads ``image``, which is None.
    """

    ids: tuple[int, ...]
    image: npt.NDArray[np.uint8] | None
    image_key: bytes | None = None
    image_tokens: Tensor | None = None


@dataclass(frozen=True)
class ContextResult:
    """Context tokens f32[K, D], how many text tokens came from the prefix cache, and whether the image was known."""

    tokens: npt.NDArray[np.float32]
    prefix_tokens_reused: int
    image_cached: bool = False


class ContextRunner:
    """The policy's backbone with its caches. For one thread."""

    def __init__(
        self, vlm: Vlm, manifest: Manifest, *, prefix_cache_tokens: int, max_image_bytes: int,
        image_cache: int = IMAGE_CACHE,
    ) -> None:  # fmt: skip
        """``manifest`` is that of the model folder ``vlm`` was loaded from; ``image_cache`` counts images."""
        self.checks = ObservationChecks(manifest, max_image_bytes)
        self._vlm = vlm.eval()
        self._max_image_bytes = max_image_bytes
        self.cache: PrefixCache[Tensor] = PrefixCache(prefix_cache_tokens, _split_kv)
        self.images: ImageCache[Tensor] = ImageCache(image_cache)

    def prepare(self, observation: Any) -> PreparedObservation:
        """Checks and decodes an Observation message.

        Raises a subclass of RequestError.
        """
        return self.decode(self.checks.check(observation))

    def decode(self, checked: CheckedObservation) -> PreparedObservation:
        """Decodes the image, unless its tokens are cached.

        Raises a subclass of RequestError.
        """
        key = hashlib.sha256(checked.jpeg).digest()
        known = self.images.get(key)
        if known is not None:  # these bytes passed before
            return PreparedObservation(checked.ids, None, key, known)
        pixels = decode_jpeg(checked.jpeg, self.checks.camera, self._max_image_bytes)
        return PreparedObservation(checked.ids, pixels, key)

    @torch.inference_mode()
    def run(self, batch: Sequence[PreparedObservation]) -> list[ContextResult]:
        """One forward pass for all; results in the order of the batch."""
        matches: list[Match[Tensor]] = []
        reused: list[int] = []
        prefixes: list[Tensor] = []
        try:
            for observation in batch:  # one after the other: the second of two equal instructions reuses the first
                matches.append(self.cache.match(observation.ids))
                reused.append(matches[-1].length)
                prefixes.append(self._prefix(matches[-1], observation.ids))
            layers = torch.stack(prefixes, dim=2).unbind(0)  # [L, 2, B, Hkv, T, d] -> L of [2, B, Hkv, T, d]
            lengths = self._vlm.text_lengths(torch.tensor([observation.ids for observation in batch]))
            images, encoded = self._image_tokens(batch)
            context = self._vlm.readout_context([(kv[0], kv[1]) for kv in layers], images, lengths).float().numpy()
        finally:
            for match in matches:
                self.cache.release(match)
        return [
            ContextResult(tokens, count, i not in encoded)
            for i, (tokens, count) in enumerate(zip(context, reused, strict=True))
        ]

    def warm_up(self, batch_size: int) -> None:
        """Runs once, so that the first robot does not wait for allocations; leaves no trace in the caches."""
        camera = self.checks.camera
        blank = np.zeros((camera.height, camera.width, 3), dtype=np.uint8)
        self.run([PreparedObservation(self.checks.tokenize(""), blank)] * batch_size)
        self.cache = PrefixCache(self.cache.capacity_tokens, _split_kv)

    def _image_tokens(self, batch: Sequence[PreparedObservation]) -> tuple[Tensor, set[int]]:
        """Tokens of all images f[B, M, d], and which of the batch were encoded: others are cached, or repeat them."""
        first: dict[bytes, int] = {}
        for i, observation in enumerate(batch):
            if observation.image_key is not None and observation.image_tokens is None:
                first.setdefault(observation.image_key, i)
        source = [i if one.image_key is None else first.get(one.image_key, i) for i, one in enumerate(batch)]
        todo = [i for i, one in enumerate(batch) if one.image_tokens is None and source[i] == i]
        tokens = [observation.image_tokens for observation in batch]
        if todo:
            pixels = torch.from_numpy(np.stack([image for i in todo if (image := batch[i].image) is not None]))
            for i, encoded in zip(todo, self._vlm.image_tokens(self._vlm.patches(pixels)), strict=True):
                tokens[i] = encoded
                key = batch[i].image_key
                if key is not None:
                    self.images.put(key, encoded.clone())  # a view would keep the whole batch alive
        return torch.stack([found for i in source if (found := tokens[i]) is not None]), set(todo)

    def _prefix(self, match: Match[Tensor], ids: tuple[int, ...]) -> Tensor:
        """Keys and values of all ids, f[L, 2, Hkv, T, d]; computes and caches what the match lacks."""
        if match.length < len(ids):
            past = None
            if match.length:
                known = torch.cat(match.handles, dim=_TOKENS).unsqueeze(2)  # with a batch axis of 1
                past = [(layer[0], layer[1]) for layer in known.unbind(0)]
            rest = torch.tensor([ids[match.length :]], dtype=torch.long)
            _, kv = self._vlm.llama(self._vlm.llama.embed(rest), past)
            whole = torch.stack([torch.stack((k[0], v[0])) for k, v in kv])
            self.cache.insert(match, ids, whole[:, :, :, match.length :].clone())
            return whole
        return match.handles[0] if len(match.handles) == 1 else torch.cat(match.handles, dim=_TOKENS)


_TOKENS = 3
"""Axis of the tokens in a handle, which is f[L, 2, Hkv, tokens, d]: keys and values of all layers in one tensor."""


def _split_kv(handle: Tensor, at: int) -> tuple[Tensor, Tensor]:
    # Copies: a view would keep the memory of an evicted tail alive.
    return handle[:, :, :, :at].clone(), handle[:, :, :, at:].clone()
