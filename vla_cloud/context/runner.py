"""Observations in, context tokens out: stage 4 (prefill) and stage 7 (context projector) for a batch of robots.

The instruction's keys and values come from the prefix cache; only the tokens that are not in it are computed. Image
tokens and readout queries of all robots of a batch then run in one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vla_cloud.context.images import decode_jpeg
from vla_cloud.core.prefix_cache import Match, PrefixCache
from vla_cloud.core.validation import InstructionTooLong, UnknownWord, check_joints, image_of
from vla_common.manifest import Manifest
from vla_models import text
from vla_models.vlm import Vlm


@dataclass(frozen=True)
class PreparedObservation:
    """A checked observation: text ids (the policy's fixed length) and pixels u8[H, W, 3]."""

    ids: tuple[int, ...]
    image: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ContextResult:
    """Context tokens f32[K, D] and how many text tokens came from the prefix cache."""

    tokens: npt.NDArray[np.float32]
    prefix_tokens_reused: int


class ContextRunner:
    """The policy's backbone with its prefix cache. For one thread."""

    def __init__(self, vlm: Vlm, manifest: Manifest, *, prefix_cache_tokens: int, max_image_bytes: int) -> None:
        """``manifest`` is that of the model folder ``vlm`` was loaded from."""
        if len(manifest.cameras) != 1:
            names = [camera.name for camera in manifest.cameras]
            raise ValueError(f"the backbone takes the image of one camera; model {manifest.name!r} lists {names}")
        self._vlm = vlm.eval()
        self._manifest = manifest
        self._camera = manifest.cameras[0]
        self._max_image_bytes = max_image_bytes
        self.cache: PrefixCache[Tensor] = PrefixCache(prefix_cache_tokens, _split_kv)

    def prepare(self, observation: Any) -> PreparedObservation:
        """Checks and decodes an Observation message.

        Raises a subclass of RequestError.
        """
        check_joints(observation.joint_names, observation.joint_positions, self._manifest.joint_names)
        ids = self._tokenize(observation.instruction)
        image = image_of(observation.images, self._camera.name)
        pixels = decode_jpeg(image.data.tobytes(), self._camera, self._max_image_bytes)
        return PreparedObservation(ids, pixels)

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
            images = torch.from_numpy(np.stack([observation.image for observation in batch]))
            lengths = self._vlm.text_lengths(torch.tensor([observation.ids for observation in batch]))
            context = self._vlm.context([(kv[0], kv[1]) for kv in layers], images, lengths).float().numpy()
        finally:
            for match in matches:
                self.cache.release(match)
        return [ContextResult(tokens, count) for tokens, count in zip(context, reused, strict=True)]

    def warm_up(self, batch_size: int) -> None:
        """Runs once, so that the first robot does not wait for allocations; leaves no trace in the cache."""
        camera = self._camera
        blank = np.zeros((camera.height, camera.width, 3), dtype=np.uint8)
        self.run([PreparedObservation(self._tokenize(""), blank)] * batch_size)
        self.cache = PrefixCache(self.cache.capacity_tokens, _split_kv)

    def _tokenize(self, instruction: str) -> tuple[int, ...]:
        vocabulary = self._manifest.instruction.vocabulary
        try:
            return tuple(text.tokenize(instruction, vocabulary, self._vlm.config.text_length))
        except text.UnknownWord as error:
            raise UnknownWord(str(error)) from error
        except text.InstructionTooLong as error:
            raise InstructionTooLong(str(error)) from error

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
