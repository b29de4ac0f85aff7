"""Text to tokens and back: the model's own tokenizer and chat template, and text of a growing answer.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json of a Hugging
Face folder. No torch. A chat template is a program that came with the model: it runs in jinja2's immutable sandbox.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_cloud.core.generate import InvalidRequest
from vla_cloud.core.tool_calls import OPEN
from vla_common.clock import NS_PER_S, Clock, SystemClock

MAX_PIECE_TOKENS = 16
"""An incomplete character is held back for so many tokens at most; UTF-8 needs 4 bytes, so that is bad text by then."""

_REPLACEMENT = "\ufffd"


class TokenizerError(ValueError):
    """The folder has no usable tokenizer; the message names the file and what to do."""


class ChatTokenizer:
    """Tokenizer of one chat model. Safe to use from several threads."""

    def __init__(self, folder: str | Path, clock: Clock | None = None) -> None:
        """``clock`` dates the prompts of templates that ask for it, in UTC.

        Raises TokenizerError for a missing or unreadable file, or a model without end-of-text tokens.
        """
        folder = self.folder = Path(folder)
        try:
            import jinja2
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise TokenizerError(f"{error.name} is not installed: pip install 'vla-runtime[chat]'") from error
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file; save the model's fast tokenizer into its folder")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path}: {error}") from error
        # A request must not be cut or padded silently because its training was.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _json(folder / "tokenizer_config.json")
        self.sampling = _sampling(folder)
        """temperature, top_p and repetition_penalty that the model's makers give, if they do."""
        self.eos_token_ids = _eos(folder)
        if not self.eos_token_ids:
            raise TokenizerError(f"{folder}: neither generation_config.json nor config.json has an eos_token_id")
        source = _template(folder, self._config)
        self.has_tools = source is not None and _takes_tools(source)
        """Whether the template writes tools itself, in the form of :mod:`vla_cloud.core.tool_calls`."""
        try:
            self._template = None if source is None else _environment(clock or SystemClock()).from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"{folder}: the chat template is not valid: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows, added ones included; a model's vocabulary may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` can be used."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a plain prompt; ``special`` adds the model's beginning-of-text token, if it has one."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation, ready for the assistant's answer; see :meth:`render`."""
        # The template writes the special tokens itself.
        return self.encode(self.render(messages, **options), special=False)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The conversation as the model's template writes it.

        ``messages`` have a role and content each; ``options`` go to the template (tools, documents, ...).

        Raises:
            InvalidRequest: no template, no messages, or the template refuses them.
        """
        import jinja2

        if self._template is None:
            raise InvalidRequest("this model has no chat template: send a plain prompt")
        if not messages:
            raise InvalidRequest("no messages: send at least one")
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise InvalidRequest(f"message {index} needs a role and content")
        values = {"add_generation_prompt": True, "bos_token": self._token("bos_token"), **options}
        values.setdefault("eos_token", self._token("eos_token"))
        try:
            return self._template.render(messages=[dict(message) for message in messages], **values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """The text of an answer to ``prompt``, as it grows."""
        return TextStream(self, prompt)

    def _token(self, name: str) -> str:
        value = self._config.get(name)
        return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


class TextStream:
    """Text of one answer, token by token: what has been given out never changes and is never half a character.

    The text of a token may depend on those before it (a leading space, bytes of one character), so a few tokens are
    decoded again with each new one, and what follows the text already given out is new. Memory and time per token do
    not grow with the answer.
    """

    def __init__(self, tokenizer: ChatTokenizer, prompt: Sequence[int] = ()) -> None:
        """The end of ``prompt`` is context only."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-MAX_PIECE_TOKENS:])
        self._given = len(self._tokens)  # tokens whose text is out
        self._context = 0  # first token decoded again

    def push(self, token: int) -> str:
        """The text that this token completes; often "" within a character that is several tokens."""
        self._tokens.append(token)
        before, after = self._texts()
        held_back = len(self._tokens) - self._given
        incomplete = len(after) <= len(before) or after.endswith(_REPLACEMENT)
        if incomplete and held_back < MAX_PIECE_TOKENS:
            return ""
        return self._give(before, after)

    def finish(self) -> str:
        """What is still held back: bytes that never became a character come out as U+FFFD."""
        before, after = self._texts()
        return self._give(before, after)

    def _texts(self) -> tuple[str, str]:
        known = self._tokenizer.decode(self._tokens[self._context : self._given])
        return known, self._tokenizer.decode(self._tokens[self._context :])

    def _give(self, before: str, after: str) -> str:
        new = after[len(before) :]
        self._tokens = self._tokens[self._given :]  # the newest piece is context for the next
        self._context, self._given = 0, len(self._tokens)
        return new


def _takes_tools(source: str) -> bool:
    """Templates of other forms are treated as if they knew none: the calls of an answer are read in one form only."""
    return re.search(r"\btools\b", source) is not None and OPEN in source


def _environment(clock: Clock) -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # trim_blocks and lstrip_blocks are what templates are written for (transformers renders them so).
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: _utc(clock).strftime(form)
    return environment


def _utc(clock: Clock) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(clock.wall_ns() / NS_PER_S, tz=datetime.timezone.utc)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # jinja2's own escapes for HTML, which a prompt is not.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several named ones
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found


def _eos(folder: Path) -> frozenset[int]:
    """Tokens that end an answer: generation_config.json counts, config.json only without it."""
    for name in ("generation_config.json", "config.json"):
        ids = list(_ids(_json(folder / name).get("eos_token_id")))
        if ids:
            return frozenset(ids)
    return frozenset()


def _sampling(folder: Path) -> dict[str, float]:
    """Of generation_config.json, what is a number in range; do_sample: false is temperature 0."""
    given = _json(folder / "generation_config.json")
    most = {"temperature": 100.0, "top_p": 1.0, "repetition_penalty": 100.0}
    numbers = {name: given.get(name) for name in most}
    found = {
        name: float(value) for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most[name]
    }  # fmt: skip
    return found | {"temperature": 0.0} if given.get("do_sample") is False else found


def _ids(value: Any) -> Iterator[int]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool):
            yield item


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
