"""A request of 64K tokens through real P and D processes, and one that is longer: refused before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the serving engine needs torch")
transformers = pytest.importorskip("transformers", reason="transformers is the reference")

from test_greedy_equality import RULES, Serving  # noqa: E402

from vla_cloud.config import RetryRules, ServingConfig  # noqa: E402
from vla_cloud.core.generate import RequestError  # noqa: E402

LONGEST = 65_536
COUNT = 4


def llama(folder: Path) -> object:
    """Random weights; rotary positions stretched by YaRN to 16 times the length it was made for."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=211, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LONGEST, initializer_range=0.3, eos_token_id=None,
        rope_scaling={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": LONGEST // 16,
                      "rope_theta": 10_000.0},
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_64k_tokens_are_served_as_transformers_would_and_more_are_refused_before_any_work(tmp_path: Path) -> None:
    theirs = llama(tmp_path)
    prompt = torch.randint(211, (LONGEST - COUNT,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        ids, expected, cache = torch.tensor([prompt]), [], None
        for _ in range(COUNT):
            out = theirs(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            expected.append(int(ids))
    config = ServingConfig(
        model=str(tmp_path), colocated=False, blocks=LONGEST // 16, deadline_s=600.0, nice=0, supervisor=RULES,
        retry=RetryRules(transfer_base_s=30.0),
    )  # fmt: skip
    serving = Serving(config)
    serving.thread.start()
    try:
        with pytest.raises(RequestError, match="shorten the prompt") as caught:
            serving.ask([*prompt, *prompt[:COUNT]])
        assert caught.value.code == "INVALID_ARGUMENT" and not serving.sent
        ((tokens, end),) = serving.ask(prompt)
        assert tokens == expected and end.attempts == 1
        assert end.prompt_tokens + end.generated_tokens == LONGEST and end.reason.value == "length"
        assert {"Reserve", "Prefill"} <= {type(message).__name__ for message in serving.sent}
        serving.baseline()
    finally:
        serving.thread.stop()
