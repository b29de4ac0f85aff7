"""What the workers together can serve, and the refusal of what they never can, before any work."""

from __future__ import annotations

from vla_cloud.core.block_pool import BLOCK_TOKENS, blocks_for
from vla_cloud.core.generate import DuplicateRequest, GenerateRequest, InvalidRequest, check_request
from vla_cloud.core.life_events import Fail
from vla_cloud.pools.events import request_error
from vla_cloud.pools.messages import Ready


class Limits:
    """The smallest context and pool of all workers ever seen: known also while all of them restart."""

    def __init__(self) -> None:
        """No worker was ready yet."""
        self._known = False
        self._max_model_len = self._total_blocks = self._vocab_size = 0

    def add(self, ready: Ready) -> None:
        """A worker is ready."""
        known = self._known
        self._max_model_len = min(self._max_model_len, ready.max_model_len) if known else ready.max_model_len
        self._total_blocks = min(self._total_blocks, ready.total_blocks) if known else ready.total_blocks
        self._vocab_size = ready.vocab_size
        self._known = True

    def check(self, request: GenerateRequest, is_draining: bool, is_here: bool) -> int:
        """The most tokens it may generate.

        Args:
            is_here: a request of the same id is being served.

        Raises:
            RequestError: it is refused; see ``code``.
        """
        if is_draining:
            raise request_error(Fail("UNAVAILABLE", "the server ends: ask another"))
        if not self._known:
            raise request_error(Fail("UNAVAILABLE", "no worker has started yet", 1.0))
        if is_here:
            raise DuplicateRequest(f"a request {request.request_id!r} is being served: give a unique id")
        check_request(request, self._max_model_len, self._vocab_size)
        if request.sampling.max_new_tokens < 1:
            raise InvalidRequest("max_new_tokens must be at least 1")
        pool_tokens, prompt_tokens = self._total_blocks * BLOCK_TOKENS, len(request.tokens)
        if blocks_for(prompt_tokens + 1) > self._total_blocks:
            told = f"the prompt has {prompt_tokens} tokens, the KV pool of a worker holds {pool_tokens}"
            raise InvalidRequest(f"{told}: shorten the prompt")
        return min(request.sampling.max_new_tokens, min(self._max_model_len, pool_tokens) - prompt_tokens)
