"""Chat, whatever the transport: a checked conversation in, text and an end out. gRPC and HTTP are thin doors to it.

Everything runs in one event loop, except that long conversations are tokenised, and images read, in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from vla_cloud.core.client import ANYBODY, Client
from vla_cloud.core.client_limits import Ticket
from vla_cloud.core.generate import (
    DeadlineExceeded,
    DuplicateRequest,
    GenerateRequest,
    ImageSpan,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    RequestError,
    SamplingParams,
    WorkerLost,
)
from vla_cloud.core.tool_prompt import Turn, render
from vla_cloud.core.ttft_predictor import TtftPredictor
from vla_cloud.gateway.answer_text import AnswerText
from vla_cloud.gateway.answer_tools import with_tool_calls
from vla_cloud.gateway.chat_trace import ChatTracing, observed
from vla_cloud.gateway.chat_types import (
    AnswerEvent,
    ChatLimits,
    ChatRequest,
    Message,
    TextPart,
    UnknownModel,
    check_chat,
)
from vla_cloud.gateway.clients import Clients
from vla_cloud.gateway.served_model import Prompt
from vla_cloud.gateway.served_model import ServedModel as ServedModel
from vla_cloud.gateway.served_model import Service as Service
from vla_cloud.pools.events import Finished, TokenEvent
from vla_common.clock import NS_PER_S, Clock
from vla_common.tracing import Tracer

_TOKENISER_THREADS = 2
_CLIENTS_CHOICE = ("CANCELLED", "DEADLINE_EXCEEDED")  # a client that ends a request so pays for its prompt


@dataclass
class _Running:
    client: Client
    model: ServedModel
    request_id: str  # Client.scoped: that of the pools
    max_tokens: int
    ticket: Ticket
    service: Service | None = None  # None while it is tokenised
    aborted: bool = False
    tokens: int = 0  # of the answer


class Chat:
    """Answers questions with the models it was given; see :meth:`stream`."""

    def __init__(
        self, models: Sequence[ServedModel], clock: Clock, limits: ChatLimits | None = None,
        clients: Clients | None = None, tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        """The first model is meant by requests that name none; ``clients`` None: no keys are asked for.

        ValueError for no model or one name twice.
        """
        self._models = {model.name: model for model in models}
        if not models or len(self._models) != len(models):
            raise ValueError(f"models need unique names, and at least one: got {[model.name for model in models]}")
        self._clock = clock
        self.tracing = None if tracer is None else ChatTracing(tracer, clock)
        self.limits = limits if limits is not None else ChatLimits()
        self.clients = clients if clients is not None else Clients(clock)
        self._running: dict[str, _Running] = {}  # by Client.scoped(request id)
        self._predictors = {name: TtftPredictor() for name in self._models}
        self._tokenising = 0
        self._threads = ThreadPoolExecutor(_TOKENISER_THREADS, "tokenise")

    @property
    def model_names(self) -> list[str]:
        """The default one first."""
        return list(self._models)

    def names_for(self, client: Client) -> list[str]:
        """Those that a client may use, its default one first."""
        return [name for name in self._models if client.may_use(name)]

    @property
    def can_see(self) -> bool:
        """Whether any model takes images."""
        return any(model.vision is not None for model in self._models.values())

    def model(self, name: str, client: Client = ANYBODY) -> ServedModel:
        """By its name, "" for the default one. UnknownModel names those there are for this client."""
        names = self.names_for(client)
        if name not in names and (name or not names):
            raise UnknownModel(f"no model {name[:80]!r} is served; there is {', '.join(names) or 'none for this key'}")
        return self._models[name or names[0]]

    def stream(self, request: ChatRequest) -> AsyncGenerator[AnswerEvent, None]:
        """Answer: TextDeltas (and ToolCallDeltas, if tools may be called), then one Done.

        Closing the generator (aclosing) aborts the request in the pools.

        Raises:
            RequestError: refused, or failed; ``code`` is a gRPC status name, ``retry_after_s`` (if it is set and above
                0) says when to try again. Text given before remains right.
        """
        answer = self._answer(request)
        if request.grammar is not None and request.grammar.kind == "tool_call":
            answer = with_tool_calls(answer)
        return answer if request.trace is None else observed(request.trace, answer, self._clock)

    async def _answer(self, request: ChatRequest) -> AsyncGenerator[AnswerEvent, None]:
        running = self._begin(request)
        model, request_id = running.model, running.request_id
        predictor = self._predictors[model.name]
        cached_tokens: int | None = None
        try:
            self._check_open(model, request, 0)
            await self._check_grammar(model, request)
            began_ns = 0 if request.trace is None else self._clock.monotonic_ns()
            prompt, images = await self._prompt(model, request)
            if request.trace is not None:
                request.trace.child("tokenise", began_ns, self._clock.monotonic_ns(), tokens=len(prompt))
            if running.aborted:
                raise RequestAborted("the request was aborted")
            self._check_open(model, request, len(prompt))
            self.clients.reserve(running.ticket, len(prompt), running.max_tokens)
            running.service = model.service
            answer = AnswerText(request, model.tokenizer, prompt)
            predictor.begin(request_id, len(prompt), self._clock.monotonic_ns())
            events = model.service.generate(self._generate(request, running, prompt, images))
            async with aclosing(cast(AsyncGenerator[TokenEvent | Finished, None], events)):
                async for event in events:
                    if isinstance(event, Finished):
                        cached_tokens = event.cached_tokens
                        running.ticket.generated(event.generated_tokens)
                        rest, done = answer.end(event)
                        if rest is not None:
                            yield rest
                        yield done
                        return
                    running.tokens += len(event.tokens)
                    running.ticket.generated(running.tokens)
                    predictor.first_token(request_id, self._clock.monotonic_ns())
                    delta = answer.take(event)
                    if delta is not None:
                        yield delta
                    if answer.stop_string is not None:
                        yield answer.stopped()
                        return
            raise WorkerLost("the answer ended without an end")
        except Exception as error:
            if getattr(error, "code", "") not in _CLIENTS_CHOICE:
                running.ticket.forgive()
            raise
        finally:  # also when the client goes away
            del self._running[request_id]
            now_ns = self._clock.monotonic_ns()
            running.ticket.end(now_ns)
            predictor.end(request_id, cached_tokens, now_ns)

    def _begin(self, request: ChatRequest) -> _Running:
        """All checks that need no work: what a client may not begin costs nobody anything."""
        client = self.clients.require(request.client)
        model = self.model(request.model, client)
        check_chat(request, self.limits, model.vision is not None)
        request_id = client.scoped(request.request_id)
        if request_id in self._running:
            raise DuplicateRequest(f"a request {request.request_id!r} is being served: give a unique id")
        max_tokens, most = request.max_tokens or self.limits.default_max_tokens, client.rules.max_tokens
        max_tokens = max_tokens if most is None else min(max_tokens, most)
        running = _Running(client, model, request_id, max_tokens, self.clients.begin(client, 1 + max_tokens))
        self._running[request_id] = running
        return running

    def abort(self, request_id: str, client: Client | None = None) -> bool:
        """End a request of this client's tenant (CANCELLED); False if it is not here. Idempotent. Unauthenticated."""
        request_id = self.clients.require(client).scoped(request_id)
        running = self._running.get(request_id)
        if running is None:
            return False
        running.aborted = True
        if running.service is not None:
            running.service.abort(request_id)
        return True

    @property
    def is_serving(self) -> bool:
        """Whether a request to any model would be taken."""
        return any(self.is_model_serving(name) for name in self._models)

    def is_model_serving(self, name: str) -> bool:
        """Whether a request to this model would be taken."""
        return bool(self.model(name).service.health()["serving"])

    def health(self) -> dict[str, dict[str, Any]]:
        """Model name to :meth:`ServingService.health`."""
        return {name: model.service.health() for name, model in self._models.items()}

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those under way; True if all ended by themselves in time."""
        services = {id(model.service): model.service for model in self._models.values()}
        return all(await asyncio.gather(*(service.drain(timeout_s) for service in services.values())))

    def close(self) -> None:
        """End the threads; requests are ended by their service."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.clients.close()
        for model in self._models.values():
            if model.vision is not None:
                model.vision.intake.close()

    def _check_open(self, model: ServedModel, request: ChatRequest, prompt_tokens: int) -> None:
        """Refuse a request whose deadline its first token would miss; ``prompt_tokens`` 0: not known yet."""
        if request.deadline_ns is None:
            return
        now_ns = self._clock.monotonic_ns()
        left_s = (request.deadline_ns - now_ns) / NS_PER_S
        if left_s <= 0:
            raise DeadlineExceeded("the deadline has passed: give the request more time")
        expected_s = self._predictors[model.name].predict_s(prompt_tokens, now_ns) if prompt_tokens else None
        if expected_s is not None and expected_s > left_s:
            told = f"the first token is expected after {expected_s:.2f} s, the deadline is in {left_s:.2f} s"
            raise DeadlineExceeded(f"{told}: give it more time, or try again when there is less to do")

    async def _check_grammar(self, model: ServedModel, request: ChatRequest) -> None:
        if request.grammar is None:
            return
        if model.grammars is None:
            raise InvalidRequest(f"model {model.name} is served without response_format and tools: ask for text")
        await model.grammars.check(request.grammar)

    async def _prompt(self, model: ServedModel, request: ChatRequest) -> Prompt:
        parts = [image for message in request.messages for image in message.images]
        if parts and model.vision is not None:
            if request.tools:
                raise InvalidRequest("images and tools in one request are not served: leave one out")
            vision, seen = model.vision, [_multimodal(message) for message in request.messages]
            async with vision.intake.taken(parts) as images:
                return await self._in_thread(lambda: vision.prompt(seen, images))
        turns = [
            Turn(one.role, one.text, tuple((c.call_id, c.name, c.arguments) for c in one.calls), one.call_id)
            for one in request.messages
        ]
        rendered = render(turns, request.tools, getattr(model.tokenizer, "has_tools", False))
        messages, options = rendered.messages, rendered.options
        size = sum(len(message["content"]) for message in messages)
        if size + sum(len(tool.parameters) for tool in request.tools) <= self.limits.inline_chars:
            return model.tokenizer.chat(messages, **options), ()
        return await self._in_thread(lambda: (model.tokenizer.chat(messages, **options), ()))

    async def _in_thread(self, work: Callable[[], Prompt]) -> Prompt:
        if self._tokenising >= self.limits.max_tokenising:
            error = QueueFull(f"overloaded: {self._tokenising} long conversations wait to be tokenised; try again")
            error.retry_after_s = 1.0  # type: ignore[attr-defined]
            raise error
        self._tokenising += 1
        future = self._threads.submit(work)
        loop = asyncio.get_running_loop()
        # Counted until the thread is done with it, also when the client has gone: the bound is on work, not on waiters.
        future.add_done_callback(lambda _: _soon(loop, self._tokenised))
        return await asyncio.wrap_future(future)

    def _tokenised(self) -> None:
        self._tokenising -= 1

    def _generate(
        self, request: ChatRequest, running: _Running, prompt: Sequence[int], images: tuple[ImageSpan, ...]
    ) -> GenerateRequest:  # fmt: skip
        usual, penalty = running.model.defaults, request.repetition_penalty
        sampling = SamplingParams(
            temperature=usual.temperature if request.temperature is None else request.temperature,
            top_p=usual.top_p if request.top_p is None else request.top_p,
            repetition_penalty=usual.repetition_penalty if penalty is None else penalty,
            seed=request.seed, logprobs=request.top_logprobs if request.logprobs else None,
            max_new_tokens=running.max_tokens, stop_token_ids=running.model.tokenizer.eos_token_ids,
        )  # fmt: skip
        client = running.client
        return GenerateRequest(
            running.request_id, tuple(prompt), sampling, client.priority(request.priority), images, client.salt,
            request.deadline_ns, session=request.session, grammar=request.grammar, trace=request.trace,
        )  # fmt: skip


def _multimodal(message: Message) -> dict[str, Any]:
    """As the templates of models that see take it."""
    return {
        "role": message.role,
        "content": [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.parts
        ],
    }


def _soon(loop: asyncio.AbstractEventLoop, callback: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop is closed: nobody counts any more
        pass


def retry_after_s(error: RequestError) -> float | None:
    """When to try again; None if waiting does not help."""
    value = float(getattr(error, "retry_after_s", 0.0))
    return value if value > 0 else None
