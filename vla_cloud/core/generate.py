"""What a client asks of the serving engine, how it ends, and the errors it may end with.

Error codes are the gRPC status names (https://grpc.io/docs/guides/status-codes/); the HTTP gateway maps them on.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_cloud.core.request_trace import RequestTrace

from vla_cloud.core.grammar_spec import KINDS, MAX_GRAMMAR_BYTES, Grammar

MAX_STOP_TOKENS = 64
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20


class RequestError(Exception):
    """A request ends (or is refused) with this. ``code`` is a gRPC status name, the text names cause and remedy."""

    code = "INTERNAL"


class InvalidRequest(RequestError):
    """Can never be served as it is; refused before any work."""

    code = "INVALID_ARGUMENT"


class DuplicateRequest(RequestError):
    """A request of this id is still alive on this worker."""

    code = "ALREADY_EXISTS"


class QueueFull(RequestError):
    """The bounded queue is full; the same request may succeed later."""

    code = "RESOURCE_EXHAUSTED"


class OutOfBlocks(RequestError):
    """The block pool cannot give that many blocks now; the request is recomputed later or fails with this."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before it was complete."""

    code = "DEADLINE_EXCEEDED"


class RequestAborted(RequestError):
    """The client went away or asked to stop."""

    code = "CANCELLED"


class TransferFailed(RequestError):
    """KV did not arrive complete and verified; nothing was decoded from it."""

    code = "UNAVAILABLE"


class WorkerLost(RequestError):
    """A worker died and no other could take the request over in time."""

    code = "UNAVAILABLE"


class EngineFailed(RequestError):
    """The model runner raised; the KV of that step is not trusted."""

    code = "INTERNAL"


class Priority(enum.IntEnum):
    """Order of service; a lower value goes first. ROBOT is the deadline class: it never waits behind chat."""

    ROBOT = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # a stop token was sampled; it is the last output token
    LENGTH = "length"  # max_new_tokens or the longest context was reached
    PUSHED = "pushed"  # role prefill: the KV has left for another worker
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens [start, start + length) of a prompt stand for an image of this SHA-256 (32 bytes)."""

    start: int
    length: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 switch these filters off.

    ``seed`` None means a seed derived from the request id (:func:`seed_of`): the same on every worker.
    ``max_new_tokens`` 0 asks for the prompt's computation only.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0  # 1 is off
    seed: int | None = None
    logprobs: int | None = None  # 0 for the drawn token alone, n > 0 also for the n most likely ones
    max_new_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request. ``tokens`` is the whole prompt; a request that goes on elsewhere has its outputs so far appended.

    ``salt`` separates the prefix caches of tenants and is set by the server, never by a client.
    ``deadline_ns`` is on this host's CLOCK_MONOTONIC; None means no deadline. Requests of one ``session`` (a name of
    the tenant's own) go to the same workers where load allows; "" for none. ``answered`` of
    the ``tokens``, at their end, are outputs of it already; ``grammar``: what those and the further ones must look like
    together.
    """

    request_id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: Priority = Priority.NORMAL
    images: tuple[ImageSpan, ...] = ()
    salt: bytes = b""
    deadline_ns: int | None = None
    session: str = ""
    answered: int = 0
    grammar: Grammar | None = None
    trace: RequestTrace | None = field(default=None, compare=False, repr=False)


def seed_of(request: GenerateRequest) -> int:
    """The request's 64-bit seed: the one given, else one derived from its id, so that every worker draws the same."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return int.from_bytes(hashlib.sha256(request.request_id.encode()).digest()[:8], "little")


def check_request(request: GenerateRequest, max_model_len: int, vocab_size: int | None = None) -> None:
    """Raise InvalidRequest for a request that can never be served: length, token range, images, parameters.

    ``max_model_len`` counts prompt and output together; a prompt must leave room for one token.
    """
    if not request.request_id:
        raise InvalidRequest("the request id is empty: give a unique one")
    room = max_model_len - (1 if request.sampling.max_new_tokens else 0)
    if not 1 <= len(request.tokens) <= room:
        raise InvalidRequest(
            f"the prompt has {len(request.tokens)} tokens, this model takes 1 to {room}: shorten the prompt"
        )
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise InvalidRequest(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    _check_images(request.images, len(request.tokens))
    _check_sampling(request.sampling)
    _check_grammar(request)


def _check_images(images: Sequence[ImageSpan], num_tokens: int) -> None:
    end = 0
    for image in images:
        if image.length < 1 or image.start < end or image.start + image.length > num_tokens:
            raise InvalidRequest(f"image span at token {image.start} is empty, overlaps another or leaves the prompt")
        if len(image.sha256) != 32:
            raise InvalidRequest(f"image span at token {image.start} needs a SHA-256 of 32 bytes")
        end = image.start + image.length


def _check_grammar(request: GenerateRequest) -> None:
    grammar = request.grammar
    if not 0 <= request.answered < len(request.tokens):
        raise InvalidRequest(f"{request.answered} of {len(request.tokens)} tokens cannot be of the answer")
    if grammar is None:
        return
    if grammar.kind not in KINDS or len(grammar.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"a grammar is one of {', '.join(KINDS)}, of at most {MAX_GRAMMAR_BYTES} bytes")
    if not request.sampling.stop_token_ids:
        raise InvalidRequest("a grammar needs stop tokens: nothing else can end the answer")


def _check_sampling(sampling: SamplingParams) -> None:
    # Comparisons written so that NaN fails them.
    if not 0.0 <= sampling.temperature <= 100.0:
        raise InvalidRequest(f"temperature {sampling.temperature} is outside 0 .. 100")
    if not 0.0 < sampling.top_p <= 1.0:
        raise InvalidRequest(f"top_p {sampling.top_p} is outside (0, 1]")
    if sampling.top_k < 0:
        raise InvalidRequest(f"top_k {sampling.top_k} is negative; 0 switches it off")
    if not 0.0 < sampling.repetition_penalty <= 100.0:
        raise InvalidRequest(f"repetition_penalty {sampling.repetition_penalty} is outside (0, 100]")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs {sampling.logprobs} is outside 0 .. {MAX_LOGPROBS}")
    if sampling.seed is not None and not 0 <= sampling.seed <= MAX_SEED:
        raise InvalidRequest(f"seed {sampling.seed} does not fit in 64 bits unsigned")
    if sampling.max_new_tokens < 0:
        raise InvalidRequest(f"max_new_tokens {sampling.max_new_tokens} is negative")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"{len(sampling.stop_token_ids)} stop tokens, at most {MAX_STOP_TOKENS} are taken")
