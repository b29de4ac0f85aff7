"""Whatever bytes come as a request: it is unreadable, refused by name, or a request that can be computed."""

import pytest

pytest.importorskip("grpc")
from hypothesis import given
from hypothesis import strategies as st

from vla_cloud.core.generate import GenerateRequest, RequestError, SamplingParams, check_request
from vla_cloud.gateway.chat_types import ChatLimits, check_chat
from vla_cloud.gateway.grpc_convert import chat_request
from vla_cloud.gateway.grpc_server import _reader
from vla_cloud.gateway.proto import vla_chat_pb2 as pb

READ = _reader(pb.GenerateRequest)

texts = st.text(max_size=20)
parts = st.one_of(
    st.builds(lambda text: pb.Part(text=text), texts), st.just(pb.Part()),
    st.builds(lambda data: pb.Part(image=pb.Image(data=data)), st.binary(max_size=5)),
)  # fmt: skip
numbers = st.floats(width=64)
samplings = st.builds(
    pb.Sampling,
    max_tokens=st.none() | st.integers(0, 2**32 - 1), temperature=st.none() | numbers, top_p=st.none() | numbers,
    repetition_penalty=st.none() | numbers, seed=st.none() | st.integers(0, 2**64 - 1), stop=st.lists(texts, max_size=6),
    logprobs=st.booleans(), top_logprobs=st.integers(0, 30),
)  # fmt: skip
messages = st.builds(
    pb.Message, role=st.sampled_from(["system", "user", "assistant", "tool", "x"]), parts=st.lists(parts, max_size=3)
)
requests = st.builds(
    pb.GenerateRequest, request_id=texts, model=texts, messages=st.lists(messages, max_size=3), sampling=samplings,
    priority=st.integers(-5, 5),
)  # fmt: skip


def usual(value: float | None) -> float:
    return 1.0 if value is None else value


def take(data: bytes) -> None:
    message = READ(data)
    if message is None:
        return
    try:
        request = chat_request(message, None)
        check_chat(request, ChatLimits(max_chars=50))
        sampling = SamplingParams(
            temperature=usual(request.temperature), top_p=usual(request.top_p),
            repetition_penalty=usual(request.repetition_penalty),
            seed=request.seed, logprobs=request.top_logprobs if request.logprobs else None,
            max_new_tokens=request.max_tokens or 1,
        )  # fmt: skip
        check_request(GenerateRequest(request.request_id, (1,), sampling), 100)
    except RequestError as error:
        assert error.code == "INVALID_ARGUMENT"
        return
    assert request.request_id and request.messages and usual(request.temperature) >= 0 and 0 < usual(request.top_p) <= 1


@given(st.binary(max_size=200))
def test_any_bytes(data):
    take(data)


@given(requests)
def test_any_request(message):
    take(message.SerializeToString())


@given(requests, st.integers(0, 400), st.integers(0, 255))
def test_a_request_with_a_wrong_byte(message, position, value):
    data = bytearray(message.SerializeToString())
    if data:
        data[position % len(data)] = value
    take(bytes(data))
