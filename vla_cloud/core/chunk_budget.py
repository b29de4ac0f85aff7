"""How the prompt tokens of one step are shared among several prompts."""

from __future__ import annotations

from collections.abc import Sequence

from vla_cloud.core.block_pool import BLOCK_TOKENS


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Equal shares of ``budget`` tokens; what a short prompt leaves of its share goes to the others.

    A share that does not complete its prompt is a multiple of 16, so that chunks end at block borders. Among
    equals rounding favours the first. The sum never exceeds the budget.
    """
    shares = [0] * len(remaining)
    left = budget
    shortest_first = sorted(range(len(remaining)), key=lambda i: (remaining[i], -i))
    for place, i in enumerate(shortest_first):
        shares[i] = _whole(remaining[i], left // (len(remaining) - place))
        left -= shares[i]
    for i, wanted in enumerate(remaining):
        more = _whole(wanted - shares[i], left)
        shares[i] += more
        left -= more
    return shares


def _whole(wanted: int, limit: int) -> int:
    return wanted if wanted <= limit else limit // BLOCK_TOKENS * BLOCK_TOKENS
