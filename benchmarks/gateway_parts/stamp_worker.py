"""A worker process as the serving engine starts it, with a model that computes nothing: its tokens tell the time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gateway_parts.stamps import WORDS, next_tick_s, stamp
from vla_cloud.engine.runner import Batch, OnLayer, Sampled
from vla_cloud.kv_transfer.layout import KvLayout
from vla_cloud.pools.worker_main import Loaded, MakePool, main
from vla_cloud.pools.worker_settings import WorkerSettings

MODEL_TOKENS = 4096
LETTERS = 257


class StampRunner:
    """A step takes as long as the most hurried request in it asks for."""

    def __init__(self, layout: KvLayout, kv: NDArray[np.uint8], phase: float) -> None:
        self._layout, self._kv, self._phase = layout, kv, phase

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def kv(self) -> NDArray[np.uint8]:
        return self._kv

    @property
    def max_model_len(self) -> int:
        return MODEL_TOKENS

    @property
    def vocab_size(self) -> int:
        return WORDS + LETTERS

    def run(self, batch: Batch, on_layer: OnLayer | None = None) -> list[Sampled]:
        asked = [(chunk.request_id, chunk.sampling) for chunk in (*batch.prefill, *batch.decode) if chunk.sampling]
        period_ms = min((rule.seed for _, rule in asked), default=0)
        if period_ms:
            time.sleep(next_tick_s(period_ms / 1000, self._phase, time.monotonic()))
        for layer in range(self._layout.layers) if on_layer is not None else ():
            on_layer(layer)
        word = stamp()
        return [Sampled(request_id, word) for request_id, _ in asked]

    def copy_blocks_out(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self._kv[:, list(blocks)].copy()

    def copy_blocks_in(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        self._kv[:, list(blocks)] = data


def load(settings: WorkerSettings, make_pool: MakePool) -> Loaded:
    layout = KvLayout("bench", "bench", layers=1, kv_heads=1, head_dim=1)
    memory = make_pool(layout)
    return Loaded(StampRunner(layout, memory.array, float(os.environ["BENCH_PHASE"])), memory, ())


if __name__ == "__main__":
    sys.exit(main(load=load))
