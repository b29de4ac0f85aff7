"""KV of preempted requests in host memory. The scheduler decides when and bounds how much; here are the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vla_cloud.core.step_plan import SwapIn, SwapOut
from vla_cloud.engine.runner import ModelRunner


class HostSwap:
    """Copies by request, each held until it is taken back in or the request ends."""

    def __init__(self, runner: ModelRunner) -> None:
        """Empty."""
        self._runner = runner
        self._copies: dict[str, NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        """Requests with a copy."""
        return len(self._copies)

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(copy.nbytes for copy in self._copies.values())

    def take_out(self, swaps: Sequence[SwapOut]) -> None:
        """Copy before anything else of the step runs: the blocks belong to others already."""
        for swap in swaps:
            self._copies[swap.seq.request_id] = self._runner.copy_blocks_out(swap.blocks)

    def put_in(self, swaps: Sequence[SwapIn]) -> None:
        """Fill the new blocks. Raises KeyError if there is no copy, which would be a fault of the engine."""
        for swap in swaps:
            copy = self._copies.pop(swap.seq.request_id)
            wanted = copy[:, swap.skip : swap.skip + len(swap.blocks)]
            self._runner.copy_blocks_in(swap.blocks, np.ascontiguousarray(wanted))

    def drop(self, request_id: str) -> None:
        """The request has ended."""
        self._copies.pop(request_id, None)

    def clear(self) -> None:
        """The engine ends."""
        self._copies.clear()
