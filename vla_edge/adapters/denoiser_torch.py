"""The denoiser in torch, one thread, float32: the reference that the other engines are compared with.

The only module of the edge that imports torch and the model's code; it is loaded only for ``policy.engine: torch``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from vla_common.manifest import Manifest
from vla_edge.core.denoiser import DenoiserError, FloatArray, Prefix
from vla_edge.core.denoiser_io import DenoiserShapes, feed_context, feed_denoise, warm_up
from vla_models.flow_head import ContextKv
from vla_models.model_folder import load_head


class TorchDenoiser:
    """``head.safetensors`` of a model folder, eager; see :class:`vla_edge.core.denoiser.Denoiser`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Load, check against the manifest, run once.

        Args:
            folder: model folder.
            manifest: its manifest.

        Raises:
            DenoiserError: the head has other shapes than the manifest says.
            ManifestError: the folder is not whole, or not a policy of this release.
        """
        torch.set_num_threads(1)
        head, _ = load_head(folder)
        self._head = head.float().eval()
        shapes = self._shapes = DenoiserShapes.of(manifest)
        c = head.config
        found = DenoiserShapes(c.context_tokens, c.context_dim, c.proprio_dim, c.horizon, c.action_dim)
        if found != shapes:
            raise DenoiserError(f"head.safetensors is for {found}, the manifest says {shapes}: export the model again "
                                "with 'vla export'")
        warm_up(self, shapes)

    @property
    def engine(self) -> str:
        """Name, version and device."""
        return f"torch {torch.__version__} cpu eager, 1 thread"

    @property
    def supports_prefix(self) -> bool:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        return True

    def encode_context(self, now: FloatArray, previous: FloatArray) -> ContextKv:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        feeds = feed_context(self._shapes, now, previous)
        with torch.inference_mode():
            kv = self._head.context_kv(*(torch.tensor(array) for array in feeds.values()))
        return kv

    def denoise(self, handle: ContextKv, proprio: FloatArray, age_s: float, gap_s: float, noise: FloatArray,
                prefix: Prefix | None = None) -> FloatArray:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        # Without a prefix its inputs are left out: the result is the same, and the guidance costs nothing.
        feeds = feed_denoise(self._shapes, proprio, age_s, gap_s, noise, prefix, prefix is not None)
        with torch.inference_mode():
            actions = self._head.denoise(handle, **{name: torch.from_numpy(array) for name, array in feeds.items()})
        return np.asarray(actions[0].numpy(), dtype=np.float32)
