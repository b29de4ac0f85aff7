"""Greedy float32 answers of real worker processes equal those of transformers, however a request travels.

With a tiny random LLaMA by default, with SmolLM2 and chat prompts among the slow tests.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from serving_rig import ROOT

from vla_cloud.config import RetryRules, ServingConfig, WorkerRules
from vla_cloud.core.generate import GenerateRequest, SamplingParams
from vla_cloud.pools import messages as wire
from vla_cloud.pools.events import Finished, TokenEvent
from vla_cloud.pools.serving_thread import ServingThread
from vla_cloud.pools.worker_settings import worker_specs
from vla_common.clock import SystemClock

torch = pytest.importorskip("torch", reason="the serving engine needs torch")
transformers = pytest.importorskip("transformers", reason="transformers is the reference")

COUNT = 48
# A killed worker stays away: what it was used for must go on without it.
RULES = WorkerRules(hang_s=60.0, backoff_min_s=600.0, backoff_max_s=600.0)
BASE = ServingConfig(
    deadline_s=240.0, max_running=8, nice=0, supervisor=RULES,
    retry=RetryRules(transfer_base_s=60.0),  # nothing is late on a loaded machine
)  # fmt: skip
# Workers take seconds to start, so each rig serves several paths. "tcp" copies the preempted to the host, others compute
# them again; prompts of up to 64 tokens are one chunk in "one worker".
RIGS: dict[str, dict[str, Any]] = {
    "one worker": dict(colocated=True, chunk_tokens=64),
    "shared_memory": dict(colocated=False, chunk_tokens=32, prefill_workers=2, decode_workers=2),
    "tcp": dict(colocated=False, chunk_tokens=64, transfer="tcp", host_swap_blocks=64),
    "nixl": dict(colocated=False, chunk_tokens=64, transfer="nixl"),
}
PATHS = {
    "one worker": ["plain", "chunked", "cached", "preempted"],
    "shared_memory": ["disaggregated", "cached", "P killed", "D killed"],
    "tcp": ["disaggregated", "cached", "preempted"],
    "nixl": ["disaggregated", "cached", "preempted"],
}


@dataclass
class Model:
    """A model folder, prompts for it, and what transformers answers.

    ``long``: the longest prompt; ``similar``: of about one length; together they do not fit into ``blocks``.
    """

    source: str
    theirs: Any
    long: list[int]
    similar: list[list[int]]
    blocks: int
    kill_prefill_after_s: float
    eos: frozenset[int] = frozenset()
    _answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def answer(self, prompt: list[int]) -> list[int]:
        """COUNT tokens, or up to the first that ends an answer."""
        if tuple(prompt) not in self._answers:
            ids = torch.tensor([prompt])
            found = self.theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            tokens = found[0, len(prompt) :].tolist()
            end = next((i for i, token in enumerate(tokens) if token in self.eos), COUNT - 1)
            self._answers[tuple(prompt)] = tokens[: end + 1]
        return self._answers[tuple(prompt)]


def tiny(folder: Path) -> Model:
    """A LLaMA of random weights, saved as a Hugging Face folder."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    draw = torch.Generator().manual_seed(5)
    long, *similar = (torch.randint(97, (n,), generator=draw).tolist() for n in (150, 41, 38, 33, 46, 35))
    return Model(str(folder), theirs, long, similar, blocks=18, kill_prefill_after_s=0.0)


def smollm2() -> Model:
    """SmolLM2-135M-Instruct with questions in its chat template."""
    chat_model = pytest.importorskip("vla_models.chat_model")
    tokenizer = pytest.importorskip("vla_cloud.engine.tokenizer")
    try:
        folder = chat_model.chat_model_folder(chat_model.SMOLLM2)
    except chat_model.ChatModelMissing as error:
        pytest.skip(str(error))
    chat = tokenizer.ChatTokenizer(folder)
    questions = [
        "Here are some notes on robots, please sum them up. " + "A robot that walks must plan each step. " * 12,
        "Why is the sky blue, and why is it red in the evening?", "Tell me a long story about a dog.",
        "How does a combustion engine work?", "Describe the water cycle.", "Write a letter to a friend about spring.",
    ]  # fmt: skip
    long, *similar = (chat.chat([{"role": "user", "content": question}]) for question in questions)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Model("smollm2", theirs, long, similar, 20, 0.2, frozenset(chat.eos_token_ids))


class Serving:
    """A running engine, what its workers said, and ways to kill them in the middle."""

    def __init__(self, config: ServingConfig, stop: frozenset[int] = frozenset()) -> None:
        self.config, self.stop = config, stop
        environment = {"PYTHONPATH": str(ROOT), "VLA_LOG": "error"}
        specs = [replace(spec, environment={**spec.environment, **environment}) for spec in worker_specs(config)]
        self.thread = ServingThread(config, SystemClock(), specs)
        self.number = 0
        self.preemptions = 0
        self.sent: list[wire.ToWorker] = []
        """About requests; nothing else."""
        self.dead: set[str] = set()
        self._hear = self.thread.service.worker_message
        self._send = self.thread.supervisor.send
        self.thread.service.worker_message = self._heard  # type: ignore[method-assign]
        self.thread.supervisor.send = self._sending  # type: ignore[method-assign]
        self.on_prefill: Callable[[str], None] | None = None
        self.on_tokens: Callable[[str], None] | None = None

    def ask(self, *prompts: list[int]) -> list[tuple[list[int], Finished]]:
        """All at once; tokens and end of each."""

        async def one(name: str, prompt: list[int]) -> tuple[list[int], Finished]:
            tokens: list[int] = []
            sampling = SamplingParams(max_new_tokens=COUNT, stop_token_ids=self.stop)
            request = GenerateRequest(name, tuple(prompt), sampling)
            async for event in self.thread.service.generate(request):
                if isinstance(event, TokenEvent):
                    tokens.extend(event.tokens)
                else:
                    return tokens, event
            raise AssertionError("a silent end")

        async def all_of_them() -> list[tuple[list[int], Finished]]:
            names = [f"r{self.number + i}" for i in range(len(prompts))]
            self.number += len(prompts)
            return await asyncio.gather(*map(one, names, prompts))

        return self.thread.call(all_of_them())

    def kill(self, worker: str) -> None:
        """At once; nothing that it said and that has not been heard yet counts."""
        self.dead.add(worker)
        pid = next(info.pid for info in self.thread.supervisor.infos() if info.worker_id == worker)
        os.kill(pid, signal.SIGKILL)

    def kill_on_prefill(self, after_s: float) -> None:
        def soon(worker: str) -> None:
            self.on_prefill = None
            asyncio.get_running_loop().call_later(after_s, self.kill, worker)

        self.on_prefill = soon

    def kill_on_tokens(self, count: int) -> None:
        heard = 0

        def hear(worker: str) -> None:
            nonlocal heard
            heard += 1
            if heard == count:
                self.on_tokens = None
                self.kill(worker)

        self.on_tokens = hear

    def _sending(self, worker: str, message: wire.ToWorker) -> bool:
        sent = self._send(worker, message)
        if isinstance(message, wire.Reserve | wire.Prefill | wire.Generate):
            self.sent.append(message)
        if isinstance(message, wire.Prefill) and self.on_prefill is not None:
            self.on_prefill(worker)
        return sent

    def _heard(self, worker: str, message: wire.ToGateway) -> None:
        if worker in self.dead:
            return
        if isinstance(message, wire.Finished):
            self.preemptions += message.preemptions
        self._hear(worker, message)
        if isinstance(message, wire.Tokens) and self.on_tokens is not None:
            self.on_tokens(worker)

    def baseline(self) -> None:
        """All blocks are back on every worker that lives."""

        async def go() -> None:
            for _ in range(2000):
                loads = [info.load for info in self.thread.supervisor.infos() if info.state == "ready"]
                if not self.thread.service.health()["unsettled"] and all(
                    load is not None and load.free_blocks == load.total_blocks and not load.quarantined_blocks
                    for load in loads
                ):  # fmt: skip
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(f"blocks are missing: {self.thread.service.health()}")

        self.thread.call(go())


class Shelf:
    """The model and the rig last used: the cases come in an order in which each is made once."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._folders = tmp_path_factory
        self._model: tuple[str, Model] | None = None
        self._serving: tuple[tuple[str, str], Serving] | None = None

    def take(self, model: str, rig: str) -> tuple[Model, Serving]:
        if self._model is None or self._model[0] != model:
            self._model = (model, smollm2() if model == "smollm2" else tiny(self._folders.mktemp("llama")))
        if self._serving is None or self._serving[0] != (model, rig):
            self.close()
            it = self._model[1]
            serving = Serving(replace(BASE, model=it.source, blocks=it.blocks, **RIGS[rig]), it.eos)
            serving.thread.start()
            self._serving = ((model, rig), serving)
        return self._model[1], self._serving[1]

    def close(self) -> None:
        if self._serving is not None:
            self._serving[1].thread.stop()
            self._serving = None


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    it = Shelf(tmp_path_factory)
    yield it
    it.close()
    torch.set_num_threads(threads)


def _cases() -> Iterator[Any]:
    for name, marks in (("tiny", ()), ("smollm2", (pytest.mark.slow, pytest.mark.timeout(900)))):
        for rig, paths in PATHS.items():
            for path in paths:
                yield pytest.param(name, rig, path, marks=marks, id=f"{name}-{rig}-{path}")


@pytest.mark.parametrize(("name", "rig", "path"), list(_cases()))
def test_greedy_tokens_are_those_of_transformers(shelf: Shelf, name: str, rig: str, path: str) -> None:
    if rig == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("nixl is not installed")
    model, serving = shelf.take(name, rig)
    if path in ("plain", "chunked", "disaggregated"):
        short = [*model.similar[:2], model.similar[3][:1], model.similar[3][:16]]
        for prompt in {"plain": short, "chunked": [model.long], "disaggregated": [model.long, *short]}[path]:
            ((tokens, end),) = serving.ask(prompt)
            assert tokens == model.answer(prompt) and end.attempts == 1
            assert path != "plain" or len(prompt) <= serving.config.chunk_tokens
            assert path != "chunked" or len(prompt) - end.cached_tokens > 2 * serving.config.chunk_tokens
    elif path == "cached":
        longer = [*model.long, *model.similar[0][:9]]
        serving.ask(model.long)
        for prompt in (model.long, longer):
            ((tokens, end),) = serving.ask(prompt)
            assert tokens == model.answer(prompt)
            assert end.cached_tokens == (len(model.long) - 1) // 16 * 16
    elif path == "preempted":
        before = serving.preemptions
        for prompt, (tokens, _) in zip(model.similar, serving.ask(*model.similar), strict=True):
            assert tokens == model.answer(prompt)
        assert serving.preemptions > before
    else:
        prompt = [*(model.similar[1] if path == "P killed" else model.similar[2])[:17], *model.long]  # not cached
        if path == "P killed":
            serving.kill_on_prefill(model.kill_prefill_after_s)
        else:
            serving.kill_on_tokens(9)
        ((tokens, end),) = serving.ask(prompt)
        assert tokens == model.answer(prompt) and end.attempts == 2
    serving.baseline()
