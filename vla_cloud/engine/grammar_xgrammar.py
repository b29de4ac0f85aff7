"""Grammars by xgrammar, over the vocabulary of a Hugging Face folder. The library is loaded at the first grammar.

Loading takes seconds (it imports torch and transformers) and happens in the thread that compiles. Compiling gives up
the interpreter's lock, so that steps go on meanwhile.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vla_cloud.core.generate import InvalidRequest
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.core.tool_calls import BEGIN, END, MIDDLE, OPEN, SEPARATOR

MISSING: Final = "structured output needs xgrammar: pip install 'vla-runtime[structured]'"
_LOOSE: Final = r'[^\"\\\r\n]'
_RIGHT: Final = r'[^\0-\x1f\"\\]'
"""The library's strings of a limited length may hold control characters, which JSON forbids; its other ones not."""
_SOURCE: Final = re.compile(r"^\[[^\]]*\] \S+?: |Check failed: \(.*?\) is \w+: ")


class XGrammarBackend:
    """See :class:`vla_cloud.engine.grammars.GrammarBackend`."""

    def __init__(self, folder: str | Path, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()) -> None:
        """``vocab_size``: of the logits, by default the tokenizer's. Nothing is loaded yet."""
        self._folder, self._vocab_size, self._eos = Path(folder), vocab_size, sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._compiler: Any = None
        self.words = 0
        """Of a mask, i32; known once loaded."""
        self._last_word = np.int32(-1)  # its bits that are tokens

    def load(self) -> None:
        """Import the library and read the vocabulary, unless it was done. Raises InvalidRequest."""
        with self._lock:
            if self._compiler is None:
                self._compiler = self._load()

    def compile(self, grammar: Grammar) -> Any:
        """See :class:`~vla_cloud.engine.grammars.GrammarBackend`."""
        self.load()
        try:
            asked = json.loads(grammar.text)
            if grammar.kind == "tool_call":
                return self._compiler.compile_structural_tag(json.dumps(structural_tag(asked)))
            if grammar.kind == "json_object":
                return self._compiler.compile_grammar(rules_of({"type": "object"}, False))
            return self._compiler.compile_grammar(rules_of(asked["schema"], asked["strict"]))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            told = _SOURCE.sub("", str(error)).strip()[:300]
            raise InvalidRequest(f"the schema cannot be compiled: {told}") from error

    def matcher(self, compiled: Any, stop_token_ids: Sequence[int]) -> XGrammarMatcher:
        """See :class:`~vla_cloud.engine.grammars.GrammarBackend`."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))
        return XGrammarMatcher(matcher, self._last_word)

    def _load(self) -> Any:
        try:
            import xgrammar
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise InvalidRequest(MISSING) from error
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        ids = tokenizer.get_vocab(with_added_tokens=True)
        size = max(ids.values()) + 1
        words = [""] * size
        for word, token in ids.items():
            words[token] = word
        for token, added in tokenizer.get_added_tokens_decoder().items():
            if added.special:
                # No text comes of it, so it must not stand for its letters within a string. An empty word is never
                # allowed, save as a stop token.
                words[token] = ""
        metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
        info = xgrammar.TokenizerInfo(
            words[: self._vocab_size], metadata["vocab_type"], vocab_size=self._vocab_size or size,
            stop_token_ids=self._eos, add_prefix_space=metadata["add_prefix_space"],
        )  # fmt: skip
        self.words = -(-info.vocab_size // 32)
        if info.vocab_size % 32:
            self._last_word = np.int32((1 << info.vocab_size % 32) - 1)
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class XGrammarMatcher:
    """See :class:`vla_cloud.engine.grammars.Matcher`."""

    def __init__(self, matcher: Any, last_word: np.int32) -> None:
        """The library's matcher, and the bits of a mask's last word that are tokens."""
        self._matcher, self._last_word = matcher, last_word

    def accept(self, token: int) -> bool:
        """See :class:`~vla_cloud.engine.grammars.Matcher`."""
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token))

    def fill(self, row: NDArray[np.int32]) -> None:
        """See :class:`~vla_cloud.engine.grammars.Matcher`."""
        if self._matcher.is_terminated():
            row[:] = 0
        else:
            self._matcher.fill_next_token_bitmask(row[np.newaxis], 0)
            row[-1] &= self._last_word


def rules_of(schema: Any, strict: bool) -> str:
    """The schema as a grammar in EBNF: on one line, one space after comma and colon.

    Where white space is free, a small model may write nothing else until it is cut.

    Raises:
        RuntimeError: the library does not take it.
    """
    import xgrammar

    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=strict)
    return str(grammar).replace(_LOOSE, _RIGHT)


def structural_tag(asked: dict[str, Any]) -> dict[str, Any]:
    """xgrammar's structural tag for a grammar of kind tool_call: calls alone, or any text up to a call's mark."""
    tags = [
        {
            "type": "tag", "begin": f"{BEGIN}{tool['name']}{MIDDLE}", "end": END,
            "content": {"type": "grammar", "grammar": rules_of(tool["parameters"], True)},
        }
        for tool in asked["tools"]
    ]  # fmt: skip
    form: dict[str, Any] = {"tags": tags, "stop_after_first": not asked["parallel"]}
    if asked["mode"] == "auto":
        form |= {"type": "triggered_tags", "triggers": [OPEN]}
    else:
        form |= {"type": "tags_with_separator", "separator": SEPARATOR, "at_least_one": True}
    return {"type": "structural_tag", "format": form}
