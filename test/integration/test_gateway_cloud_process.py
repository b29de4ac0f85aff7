"""The cloud process with a chat model and a gRPC door: question, answer, and an end that finishes what is under way."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch", reason="the workers run a model")
transformers = pytest.importorskip("transformers", reason="writes the chat model")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
import grpc.aio  # noqa: E402
from grpc_rig import ask  # noqa: E402
from tiny_chat_tokenizer import END, VOCAB, prompt_of, tiny_tokenizer  # noqa: E402

from vla_cloud.gateway.proto import vla_chat_pb2 as pb  # noqa: E402
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc  # noqa: E402

ROOT = Path(__file__).parents[2]
COUNT = 200


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A folder with a LLaMA of random weights and its tokenizer, and the greedy answer of transformers to "hi"."""
    folder = tmp_path_factory.mktemp("chat") / "small"
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(folder)
    ids = torch.tensor([prompt_of(("user", "hi"))])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT, eos_token_id=None, pad_token_id=0
    )  # fmt: skip
    tokens = found[0, ids.shape[1] :].tolist()
    return folder, tokens[: tokens.index(END)] if END in tokens else tokens, tokenizer


def command(chat_model, door, *settings):
    given = [f"serving.model={chat_model}", f"gateway.grpc_listen={door}", *settings]
    sets = [part for one in given for part in ("--set", one)]
    return [sys.executable, "-m", "vla_cloud.cloud_main", "--listen", "tcp/127.0.0.1:0", *sets]


def test_a_question_is_answered_and_the_end_waits_for_the_answer(chat_model, tmp_path):
    folder, tokens, tokenizer = chat_model
    door = f"unix:{tmp_path}/door"

    async def talk(process):
        async with grpc.aio.insecure_channel(door) as channel:
            stub = pb_grpc.ChatStub(channel)
            (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
            assert model.name == "small" and model.is_serving
            sampling = {"max_tokens": COUNT, "temperature": 0.0}
            answer = await stub.Generate(ask("hi", sampling=sampling))
            assert list(answer.tokens) == tokens and answer.text
            for _ in range(5):  # if this process stood still, the first read may bring the whole answer
                call = stub.GenerateStream(ask("hi", sampling=sampling))
                got = list((await call.read()).delta.tokens)
                if len(got) < len(tokens):
                    break
            assert len(got) < len(tokens)
            process.send_signal(signal.SIGTERM)
            while (chunk := await call.read()) is not grpc.aio.EOF:
                got += chunk.delta.tokens
            assert got == tokens

    arguments = command(folder, door, "gateway.drain_s=120")  # the answer takes long on a busy machine
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert process.stdout.readline().startswith("READY "), log.read_text()
        asyncio.run(talk(process))
        assert process.wait(150.0) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("door", "told"), [("0.0.0.0:0", "other machines"), ("nonsense", "form"), ("127.0.0.1:0", "no such file")]
)
def test_a_door_that_cannot_be_opened_is_told_before_a_worker_starts(chat_model, tmp_path, door, told):
    folder = chat_model[0]
    if told == "no such file":
        folder = tmp_path / "empty"
        folder.mkdir()
    found = subprocess.run(command(folder, door), cwd=ROOT, capture_output=True, text=True, timeout=120.0)
    assert found.returncode == 2 and told in found.stderr, found.stderr
