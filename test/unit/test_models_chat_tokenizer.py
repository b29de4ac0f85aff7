"""Tokenizer, chat template and the text of a growing answer, on a tiny byte-level vocabulary."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_cloud.core.generate import InvalidRequest
from vla_cloud.engine.tokenizer import MAX_PIECE_TOKENS, ChatTokenizer, TokenizerError
from vla_common.clock import ManualClock

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'vla-runtime[chat]'")

END, START = "<|end|>", "<|start|>"
TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'fail' %}{{ raise_exception('no ' + message.role) }}{% endif %}\n"
    "{{ bos_token + message['role'] + ': ' + message['content'] }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif %}"
)


def write(folder, template: str | None = TEMPLATE, generation=None, config=None, truncation: int | None = None):
    """All bytes as tokens and a few merges; the two special tokens come first."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = [END, START, *alphabet, "he", "ll", "hell", "Ġw", "æĹ"]  # the last: two of the three bytes of 日
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("æ", "Ĺ")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in (END, START)])
    if truncation is not None:
        tokenizer.enable_truncation(truncation)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings_ = {"bos_token": {"__type": "AddedToken", "content": START}, "eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0} if config is None else config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer(write(tmp_path_factory.mktemp("tokenizer")))


def streamed(tokenizer: ChatTokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in tokens), stream.finish()]


@settings(deadline=None)
@given(st.text(max_size=40))
def test_the_pieces_of_any_text_make_the_text(tokenizer, text):
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 262), max_size=60))
def test_the_pieces_of_any_tokens_end_as_they_decode_and_never_take_back(tokenizer, tokens):
    """Random bytes: what is not a character comes out as U+FFFD, complete characters as they are."""
    pieces = streamed(tokenizer, tokens)
    whole = tokenizer.decode(tokens)
    assert "".join(pieces).replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_no_half_character_is_given_out(tokenizer):
    tokens = tokenizer.encode("a🤖日é")
    pieces = streamed(tokenizer, tokens)
    assert len(tokens) == 1 + 4 + 2 + 2
    assert pieces == ["a", "", "", "", "🤖", "", "日", "", "é", ""]


def test_an_answer_that_ends_within_a_character_shows_that_it_does(tokenizer):
    assert streamed(tokenizer, tokenizer.encode("ok🤖")[:-1]) == ["o", "k", "", "", "", "\ufffd"]


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever(tokenizer):
    (stray,) = tokenizer.encode("日")[-1:]
    stream = tokenizer.stream()
    pieces = [stream.push(stray) for _ in range(5 * MAX_PIECE_TOKENS)]
    assert "".join(pieces).count("\ufffd") >= 4 * MAX_PIECE_TOKENS


def test_special_tokens_have_no_text_and_do_not_disturb_their_neighbours(tokenizer):
    tokens = [*tokenizer.encode("hell"), 1, *tokenizer.encode("日")[:1], 0, *tokenizer.encode("o")]
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any(name in "".join(pieces) for name in (END, START))


def test_memory_of_a_long_answer_is_that_of_a_short_one(tokenizer):
    stream = tokenizer.stream(tokenizer.encode("prompt" * 100))
    for token in (tokenizer.encode("hello w") + [0] * 40) * 50:
        stream.push(token)
        assert len(stream._tokens) <= 3 * MAX_PIECE_TOKENS


def test_a_conversation_is_what_its_template_writes(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello\nw"}]
    expected = f"{START}system: be brief\n{START}user: hello\nw\n{START}assistant:"
    assert tokenizer.render(messages) == expected
    tokens = tokenizer.chat(messages)
    assert tokens.count(1) == 3, "written once by the template, and not added again"
    assert tokenizer.render(messages, add_generation_prompt=False) == expected.removesuffix(f"{START}assistant:")


def test_rendering_is_that_of_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(write(tmp_path / "t"))
    messages = [{"role": "user", "content": "hello w"}, {"role": "assistant", "content": " x "}, {"role": "user", "content": "y"}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == tokenizer.render(messages)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"role": "user"}], "message 0 needs"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1 needs"),
        ([{"role": "fail", "content": "a"}], "refuses these messages: no fail"),
        ([{"role": "user", "content": None}], "refuses these messages"),
        ([{"role": "user", "content": [{"type": "image"}]}], "refuses these messages"),
    ],
)
def test_messages_that_the_template_cannot_take_are_an_invalid_request(tokenizer, messages, words):
    with pytest.raises(InvalidRequest, match=words):
        tokenizer.chat(messages)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path, attack):
    tokenizer = ChatTokenizer(write(tmp_path / "t", template=attack))
    with pytest.raises(InvalidRequest, match="refuses"):
        tokenizer.render([{"role": "user", "content": "a"}])


def test_a_date_in_a_template_comes_from_the_given_clock(tmp_path):
    clock = ManualClock(wall_ns=1_700_000_000 * 10**9)
    tokenizer = ChatTokenizer(write(tmp_path / "t", template="{{ strftime_now('%Y-%m-%d') }}"), clock)
    assert tokenizer.render([{"role": "user", "content": "a"}]) == "2023-11-14"


def test_a_template_file_goes_before_the_configuration(tmp_path):
    folder = write(tmp_path / "t")
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}")
    found = ChatTokenizer(folder).render([{"role": "user", "content": "<é>"}])
    assert found == '[{"role": "user", "content": "<é>"}]'


def test_a_model_without_a_template_takes_plain_prompts_only(tmp_path):
    tokenizer = ChatTokenizer(write(tmp_path / "t", template=None))
    assert not tokenizer.has_chat_template and tokenizer.encode("hell")
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [0, 7]}, {"eos_token_id": 3}, {0, 7}),
        ({"eos_token_id": 5}, {}, {5}),
        ({}, {"eos_token_id": 3}, {3}),
        (None, {"eos_token_id": [3, 4]}, {3, 4}),
    ],
)
def test_the_tokens_that_end_an_answer(tmp_path, generation, config, expected):
    assert ChatTokenizer(write(tmp_path / "t", generation=generation, config=config)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}, {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}),
        ({"temperature": 1, "top_p": 1.5, "repetition_penalty": True}, {"temperature": 1.0}),
        ({"temperature": None, "top_p": "0.9", "repetition_penalty": -1}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        (None, {}),
    ],
)  # fmt: skip
def test_the_sampling_that_the_makers_recommend(tmp_path, generation, expected):
    assert ChatTokenizer(write(tmp_path, generation=generation)).sampling == expected


def test_a_long_prompt_is_not_cut_silently(tmp_path):
    assert len(ChatTokenizer(write(tmp_path / "t", truncation=4)).encode("123456789")) == 9


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    with pytest.raises(TokenizerError, match="tokenizer.json: no such file"):
        ChatTokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="eos_token_id"):
        ChatTokenizer(write(tmp_path / "a", config={}))
    with pytest.raises(TokenizerError, match="template is not valid"):
        ChatTokenizer(write(tmp_path / "b", template="{% for"))
    folder = write(tmp_path / "c")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        ChatTokenizer(folder)
