"""What to push when, and how long a KV transfer may take.

Layer by layer while the model computes hides the transfer behind the compute of long prompts; for short ones the many
small pushes cost more than they hide (reported for 4K tokens: first token after 378 instead of 1192 ms; for 256: 18 %
later). So a threshold decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_common.clock import NS_PER_S


@dataclass(frozen=True)
class TransferConfig:
    """Settings of transfers.

    Attributes:
        layerwise_tokens: prompts with at least this many tokens to compute are pushed layer by layer.
        base_s, margin: a transfer may take ``base_s + bytes / bandwidth * margin``, at most ``max_s``.
        bandwidth_bytes_per_s: assumed before anything was measured; a slow network, so that the first is not cut off.
        smoothing: weight of the newest measurement.
        min_sample_bytes: smaller transfers measure latency, not bandwidth, and are not taken.
    """

    layerwise_tokens: int = 1024
    base_s: float = 0.5
    margin: float = 4.0
    max_s: float = 25.0
    bandwidth_bytes_per_s: float = 100e6
    smoothing: float = 0.2
    min_sample_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not (self.layerwise_tokens >= 1 and 0 < self.base_s <= self.max_s and self.margin >= 1
                and self.bandwidth_bytes_per_s > 0 and 0 < self.smoothing <= 1 and self.min_sample_bytes >= 1):
            raise ValueError(f"impossible transfer settings: {self}")


class Bandwidth:
    """Measured bandwidth to one receiver, and the deadline that follows from it."""

    def __init__(self, config: TransferConfig) -> None:
        """Nothing measured."""
        self._config = config
        self._measured: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """Exponentially weighted mean of what was measured, or the configured guess."""
        return self._config.bandwidth_bytes_per_s if self._measured is None else self._measured

    def measured(self, num_bytes: int, elapsed_ns: int) -> None:
        """A transfer ended well; those too small to tell are ignored."""
        if num_bytes < self._config.min_sample_bytes or elapsed_ns <= 0:
            return
        sample = num_bytes * NS_PER_S / elapsed_ns
        # The mean is taken of seconds per byte: one slow transfer must count, as the deadline adds up seconds.
        weight = self._config.smoothing
        self._measured = sample if self._measured is None else 1.0 / (
            weight / sample + (1.0 - weight) / self._measured)

    def timed_out(self, num_bytes: int, elapsed_ns: int) -> None:
        """A transfer was cut off at its deadline: it was at least this slow. So a slow link is learnt, too."""
        if self._measured is None or num_bytes * NS_PER_S < self._measured * elapsed_ns:
            self.measured(num_bytes, elapsed_ns)

    def allowed_ns(self, num_bytes: int) -> int:
        """How long a transfer of that size may take."""
        config = self._config
        seconds = config.base_s + num_bytes / self.bytes_per_s * config.margin
        return round(min(seconds, config.max_s) * NS_PER_S)


@dataclass(frozen=True)
class Push:
    """Layers ``layers`` of the blocks ``blocks``, both half-open; blocks count from the start of the sequence."""

    layers: range
    blocks: range


class PushPlan:
    """What of one prompt is to be pushed now, so that every piece goes exactly once and never before it is complete.

    A block is complete in a layer when its last token is computed there; the last block of the prompt, when the prompt
    is. Call ``at_start``, then for each chunk ``after_layer`` per layer (if ``layerwise``) and ``after_chunk``.
    """

    def __init__(self, *, layers: int, block_size: int, total_tokens: int, cached_tokens: int = 0,
                 held_tokens: int = 0, layerwise: bool = False) -> None:
        """Plan for one prompt.

        Args:
            total_tokens: of the prompt.
            cached_tokens: found in P's own tree, whole blocks.
            held_tokens: D holds these already, whole blocks: not pushed.
            layerwise: see :func:`choose_layerwise`.

        Raises:
            ValueError: impossible numbers.
        """
        for name, value in (("cached_tokens", cached_tokens), ("held_tokens", held_tokens)):
            if not 0 <= value <= total_tokens or value % block_size:
                raise ValueError(f"{name} = {value}: a multiple of {block_size} up to {total_tokens}")
        if layers < 1 or block_size < 1 or total_tokens < 1:
            raise ValueError("a plan needs at least one layer, and one token")
        self.layerwise = layerwise
        self._layers = layers
        self._block_size = block_size
        self._total = total_tokens
        self._cached = cached_tokens
        self._next = [held_tokens // block_size] * layers

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt."""
        return -(-self._total // self._block_size)

    @property
    def done(self) -> bool:
        """Whether every piece was handed out."""
        return all(block >= self.num_blocks for block in self._next)

    def at_start(self) -> list[Push]:
        """What P's tree holds and D does not."""
        return self._up_to(range(self._layers), self._cached)

    def after_layer(self, layer: int, computed_tokens: int) -> list[Push]:
        """The layer is computed for all tokens before ``computed_tokens``; nothing unless layerwise."""
        return self._up_to(range(layer, layer + 1), computed_tokens) if self.layerwise else []

    def after_chunk(self, computed_tokens: int) -> list[Push]:
        """All layers are computed for the tokens before ``computed_tokens``."""
        return self._up_to(range(self._layers), computed_tokens)

    def _up_to(self, layers: range, computed_tokens: int) -> list[Push]:
        """Complete blocks not handed out yet, neighbouring layers with the same blocks in one push."""
        whole = computed_tokens >= self._total
        end = self.num_blocks if whole else computed_tokens // self._block_size
        pushes: list[Push] = []
        for layer in layers:
            blocks = range(self._next[layer], end)
            if not blocks:
                continue
            self._next[layer] = end
            if pushes and pushes[-1].blocks == blocks and pushes[-1].layers.stop == layer:
                pushes[-1] = Push(range(pushes[-1].layers.start, layer + 1), blocks)
            else:
                pushes.append(Push(range(layer, layer + 1), blocks))
        return pushes


def choose_layerwise(config: TransferConfig, uncached_tokens: int) -> bool:
    """Whether to push layer by layer: only compute hides a transfer, so what was cached does not count."""
    return uncached_tokens >= config.layerwise_tokens
