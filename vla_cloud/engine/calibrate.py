"""Measures, before a worker serves, what moving KV to the host and back costs against computing it again."""

from __future__ import annotations

from dataclasses import replace

from vla_cloud.core.block_pool import BLOCK_TOKENS
from vla_cloud.core.step_plan import SchedulerConfig
from vla_cloud.engine.runner import Batch, Chunk, ModelRunner
from vla_common.clock import NS_PER_S, Clock

_BLOCKS = 32
_REPEATS = 3


def with_host_swap(runner: ModelRunner, limits: SchedulerConfig, host_blocks: int, clock: Clock) -> SchedulerConfig:
    """``limits`` with a host copy of up to ``host_blocks`` blocks, and the measured rates that decide when it is used.

    Writes into the first blocks of the runner's pool, so nothing may be in use. 0 host blocks: nothing is measured.
    """
    if host_blocks <= 0:
        return replace(limits, host_blocks=0)
    count = min(_BLOCKS, runner.kv.shape[1], limits.max_model_len // BLOCK_TOKENS)
    blocks = list(range(max(1, count)))
    prompt = Chunk("calibration", [0] * min(len(blocks) * BLOCK_TOKENS, limits.max_model_len), 0, blocks)
    # The best of a few: the first pays for page faults and compilation, others for what else the machine does.
    compute_ns = min(_compute_ns(runner, prompt, clock) for _ in range(_REPEATS))
    copy_ns = min(_copy_ns(runner, blocks, clock) for _ in range(_REPEATS))
    bytes_per_block = runner.layout.block_bytes
    return replace(
        limits,
        host_blocks=host_blocks,
        bytes_per_block=bytes_per_block,
        host_bandwidth_bytes_s=2 * len(blocks) * bytes_per_block * NS_PER_S / copy_ns,
        prefill_tokens_s=len(prompt.token_ids) * NS_PER_S / compute_ns,
    )


def _compute_ns(runner: ModelRunner, prompt: Chunk, clock: Clock) -> int:
    start_ns = clock.monotonic_ns()
    runner.run(Batch(prefill=[prompt]))
    return max(1, clock.monotonic_ns() - start_ns)


def _copy_ns(runner: ModelRunner, blocks: list[int], clock: Clock) -> int:
    """Out and in again."""
    start_ns = clock.monotonic_ns()
    runner.copy_blocks_in(blocks, runner.copy_blocks_out(blocks))
    return max(1, clock.monotonic_ns() - start_ns)
