"""The trained policy as one in-process object, for closed-loop evaluation faster than real time."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from vla_models.flow_head import ContextKv, FlowHead
from vla_models.text import tokenize
from vla_models.training.data import decode_images
from vla_models.vlm import Vlm

PAIR_S, PAIR_MIN_S, PAIR_MAX_S = 0.5, 0.2, 0.8


class InProcessPolicy:
    """Backbone and head with the same pairing of contexts as the edge's mailbox."""

    def __init__(self, vlm: Vlm, head: FlowHead, vocabulary: tuple[str, ...]) -> None:
        self.vlm, self.head, self.vocabulary = vlm.eval(), head.eval(), vocabulary
        self._contexts: deque[tuple[float, torch.Tensor]] = deque(maxlen=12)
        self._prefix: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lengths: torch.Tensor | None = None
        self._kv: ContextKv | None = None
        self._dt_s = PAIR_S

    def reset(self, instruction: str) -> None:
        """Start an instruction: contexts of the one before are of another object."""
        ids = torch.tensor([tokenize(instruction, self.vocabulary, self.vlm.config.text_length)])
        self._lengths = self.vlm.text_lengths(ids)
        with torch.no_grad():
            self._prefix = self.vlm.encode_text(ids)
        self._contexts.clear()
        self._kv = None

    def act(
        self, image_jpeg: bytes | None, stamp_s: float, q_cmd: npt.NDArray[np.float64], grip_meas: float, now_s: float
    ) -> npt.NDArray[np.float64] | None:
        """A chunk of absolute commands f64[H, 8], or None before the first image."""
        with torch.no_grad():
            if image_jpeg is not None:
                self._observe(image_jpeg, stamp_s)
            if self._kv is None:
                return None
            proprio = torch.tensor([[*q_cmd, grip_meas]], dtype=torch.float32)
            age = torch.tensor([[now_s - self._contexts[-1][0]]], dtype=torch.float32)
            c = self.head.config
            deltas = self.head.denoise(
                self._kv, proprio, age, torch.tensor([[self._dt_s]]), torch.zeros(1, c.horizon, c.action_dim)
            )
        return np.asarray(q_cmd)[None] + deltas[0].numpy().astype(np.float64)

    def _observe(self, image_jpeg: bytes, stamp_s: float) -> None:
        blob = np.frombuffer(image_jpeg, np.uint8)
        image = torch.from_numpy(decode_images(blob, np.array([0, len(blob)])))
        now = self.vlm.context(self._prefix, image, self._lengths)
        self._contexts.append((stamp_s, now))
        older = [(s, c) for s, c in self._contexts if PAIR_MIN_S - 1e-6 <= stamp_s - s <= PAIR_MAX_S + 1e-6]
        previous, self._dt_s = now, PAIR_S
        if older:
            stamp, previous = min(older, key=lambda entry: abs(stamp_s - entry[0] - PAIR_S))
            self._dt_s = stamp_s - stamp
        self._kv = self.head.context_kv(now, previous)
