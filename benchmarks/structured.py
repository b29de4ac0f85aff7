"""What a grammar costs a decode step: SmolLM2 on this machine, rows with a JSON schema beside the same rows without.

    python benchmarks/structured.py [--steps 100] [--model smollm2]

Prints the median time of a step, of its masks and of taking them out of the logits (within the step), and the median
ratio of a step to one without grammars just before it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

from vla_cloud.core.block_pool import blocks_for
from vla_cloud.core.generate import GenerateRequest, SamplingParams
from vla_cloud.core.grammar import Tool, json_schema_grammar, tool_grammar
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.core.sequence import TokenSequence
from vla_cloud.engine.allowed_tokens import forbid_others
from vla_cloud.engine.grammar_xgrammar import XGrammarBackend
from vla_cloud.engine.grammars import Grammars
from vla_cloud.engine.runner import Batch, Chunk, sampling_rule
from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.engine.torch_runner import TorchRunner
from vla_models.chat_model import load_chat_model

QUESTION = "Write a long list of things as JSON."
SCHEMA = {
    "type": "object", "required": ["items"],
    "properties": {"items": {"type": "array", "minItems": 500, "items": {
        "type": "object", "required": ["name", "size", "tags"],
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"},
                       "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
    }}},
}  # fmt: skip
GRAMMARS: dict[str, Grammar | None] = {
    "none": None, "json_schema": json_schema_grammar(SCHEMA), "tools auto": tool_grammar([Tool("weather")], "auto"),
}  # fmt: skip


class Case:
    """Some rows that decode together."""

    def __init__(
        self, runner: TorchRunner, backend: XGrammarBackend, tokenizer: ChatTokenizer, wished: Sequence[Grammar | None],
        steps: int, first_block: int,
    ) -> None:  # fmt: skip
        self._runner, self._grammars = runner, Grammars(backend, runner.vocab_size)
        prompt = tokenizer.chat([{"role": "user", "content": QUESTION}])
        per_row = blocks_for(len(prompt) + steps + 2)
        self.next_block = first_block + per_row * len(wished)
        self._tables = [list(range(start, start + per_row)) for start in range(first_block, self.next_block, per_row)]
        self._seqs = []
        for row, grammar in enumerate(wished):
            rule = SamplingParams(1.0, seed=row, max_new_tokens=steps, stop_token_ids=tokenizer.eos_token_ids)
            seq = TokenSequence(GenerateRequest(f"r{row}", tuple(prompt), rule, grammar=grammar))
            while grammar is not None and not self._grammars.is_ready(grammar):
                time.sleep(0.001)
            self._grammars.begin(seq)
            self._seqs.append(seq)
            runner.run(Batch(prefill=[Chunk(seq.request_id, prompt[:-1], 0, self._tables[row])]))
        self.whole_s: list[float] = []
        self.masks_s: list[float] = []
        self.apply_s: list[float] = []

    def step(self) -> None:
        """A token for each row."""
        begun = time.perf_counter()
        masks, errors = self._grammars.masks(self._seqs) if self._grammars else ({}, {})
        assert not errors
        masked = time.perf_counter()
        decode = [
            Chunk(seq.request_id, seq.tokens[-1:], len(seq.tokens) - 1, table, sampling_rule(seq.request), (),
                  masks.get(seq.request_id))
            for seq, table in zip(self._seqs, self._tables, strict=True)
        ]  # fmt: skip
        sampled = self._runner.run(Batch(decode=decode))
        self.whole_s.append(time.perf_counter() - begun)
        self.masks_s.append(masked - begun)
        for seq, one in zip(self._seqs, sampled, strict=True):
            seq.tokens.append(one.token_id)
            if one.token_id in seq.request.sampling.stop_token_ids:
                self._grammars.end(seq.request_id)
        logits = np.zeros((len(decode), self._runner.vocab_size), np.float32)
        begun = time.perf_counter()
        forbid_others(logits, [chunk.allowed for chunk in decode])
        self.apply_s.append(time.perf_counter() - begun)

    def close(self) -> None:
        self._grammars.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    model = load_chat_model(options.model)
    tokenizer = ChatTokenizer(model.folder)
    runner = TorchRunner(model, num_blocks=8 * len(GRAMMARS) * blocks_for(options.steps + 80))
    runner.warm_up(64, 8)
    backend = XGrammarBackend(model.folder, runner.vocab_size, sorted(tokenizer.eos_token_ids))
    begun = time.perf_counter()
    backend.load()
    print(f"library and vocabulary of {runner.vocab_size} tokens: {time.perf_counter() - begun:.1f} s")
    for name, grammar in GRAMMARS.items():
        if grammar is not None:
            begun = time.perf_counter()
            backend.compile(grammar)
            print(f"compile {name}: {(time.perf_counter() - begun) * 1e3:.1f} ms")
    print(f"{'rows':>4} {'grammar':>12} {'step ms':>8} {'masks ms':>9} {'apply ms':>9} {'ratio':>6}")
    for rows in (1, 8):
        kinds = {name: [grammar] * rows for name, grammar in GRAMMARS.items()}
        cases, block = {}, 0
        for name, wished in kinds.items():
            cases[name] = Case(runner, backend, tokenizer, wished, options.steps, block)
            block = cases[name].next_block
        for _ in range(options.steps):  # in turn, so that a busy machine slows all of them
            for case in cases.values():
                case.step()
        plain = cases["none"].whole_s
        for name, case in cases.items():
            ratio = statistics.median(mine / other for mine, other in zip(case.whole_s, plain, strict=True))
            times = (statistics.median(values) * 1e3 for values in (case.whole_s, case.masks_s, case.apply_s))
            print(f"{rows:>4} {name:>12} " + "{:>8.2f} {:>9.3f} {:>9.3f}".format(*times) + f" {ratio:>6.3f}")
            case.close()


if __name__ == "__main__":
    main()
