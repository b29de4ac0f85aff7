"""Answer prompts with the serving engine on this machine, without a server: worker processes are started for it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vla_cloud.config import CloudConfig, ServingConfig
from vla_cloud.core.generate import GenerateRequest, RequestError, SamplingParams
from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.pools.events import Finished, TokenEvent
from vla_cloud.pools.serving_thread import ServingError, ServingThread
from vla_common.clock import NS_PER_S, Clock, SystemClock
from vla_common.config import ConfigError, load_config
from vla_common.logging_setup import add_log_argument, setup_logging
from vla_common.process import end_with_parent
from vla_models.chat_model import chat_model_folder

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """Arguments of ``vla generate``."""
    result = argparse.ArgumentParser(prog="vla generate", description=__doc__)
    result.add_argument("prompt", nargs="+", help="a question; several are answered at the same time")
    result.add_argument("--config", type=Path, help="YAML file, such as config/cloud.yaml; default: built-in values")
    result.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one value")
    result.add_argument("--model", default="smollm2", help="smollm2, a Hugging Face LLaMA folder or a .gguf file")
    result.add_argument("--colocated", action="store_true", help="one worker instead of a prefill and a decode worker")
    result.add_argument("--max-tokens", type=int, default=128, help="longest answer (128)")
    result.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    result.add_argument("--top-p", type=float, default=1.0)
    result.add_argument("--repetition-penalty", type=float, default=1.0)
    result.add_argument("--seed", type=int, help="same seed, same answer")
    result.add_argument("--plain", action="store_true", help="prompts as they are, without the model's chat template")
    add_log_argument(result)
    return result


@dataclass
class Answer:
    """One prompt's answer as it grows; instants of CLOCK_MONOTONIC."""

    prompt: str
    tokens: tuple[int, ...]
    begun_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    text: list[str] = field(default_factory=list)
    end: Finished | None = None

    def report(self) -> str:
        """Counts and times, one line."""
        assert self.end is not None
        count = self.end.generated_tokens
        first_ms = (self.first_ns - self.begun_ns) / 1e6
        each_ms = (self.last_ns - self.first_ns) / 1e6 / max(1, count - 1)
        return (f"{self.end.prompt_tokens} prompt tokens, {self.end.cached_tokens} of them cached; {count} tokens "
                f"({self.end.reason.value}); first after {first_ms:.0f} ms, then {each_ms:.1f} ms each")


def main(argv: Sequence[str] | None = None) -> int:
    """Answer and end.

    Returns:
        0; 1 if a request failed or the workers did not start; 2 for a wrong command line or configuration.
    """
    end_with_parent()
    arguments = parser().parse_args(argv)
    setup_logging("generate")
    clock = SystemClock()
    try:
        serving = _serving(arguments)
        tokenizer = ChatTokenizer(chat_model_folder(arguments.model), clock)
        answers = [_encode(tokenizer, prompt, arguments.plain) for prompt in arguments.prompt]
        sampling = SamplingParams(
            temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed,
            repetition_penalty=arguments.repetition_penalty, max_new_tokens=arguments.max_tokens,
            stop_token_ids=tokenizer.eos_token_ids,
        )  # fmt: skip
    except (ConfigError, RequestError, ValueError) as error:
        print(f"vla generate: {error}", file=sys.stderr)
        return EXIT_USAGE
    pools = ServingThread(serving, clock)
    try:
        pools.start()
        pools.call(_all(pools, tokenizer, answers, sampling, clock))
    except (ServingError, RequestError) as error:
        print(f"vla generate: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        pools.stop()
    return EXIT_OK


def _serving(arguments: argparse.Namespace) -> ServingConfig:
    serving = load_config(CloudConfig, arguments.config, arguments.set).serving
    given = {"model": arguments.model} | ({"colocated": True} if arguments.colocated else {})
    return dataclasses.replace(serving, **given)


def _encode(tokenizer: ChatTokenizer, prompt: str, plain: bool) -> Answer:
    tokens = tokenizer.encode(prompt) if plain else tokenizer.chat([{"role": "user", "content": prompt}])
    return Answer(prompt, tuple(tokens))


async def _all(
    pools: ServingThread, tokenizer: ChatTokenizer, answers: list[Answer], sampling: SamplingParams, clock: Clock
) -> None:
    """A single answer is shown as it grows, several one after the other."""
    is_single = len(answers) == 1
    await asyncio.gather(*(_one(pools, tokenizer, answer, sampling, clock, is_single) for answer in answers))
    for answer in answers:
        print("" if is_single else f"> {answer.prompt}\n{''.join(answer.text)}")
        print(f"  [{answer.report()}]", flush=True)


async def _one(
    pools: ServingThread, tokenizer: ChatTokenizer, answer: Answer, sampling: SamplingParams, clock: Clock, show: bool
) -> None:
    stream = tokenizer.stream(answer.tokens)
    answer.begun_ns = clock.monotonic_ns()
    deadline_ns = answer.begun_ns + 3600 * NS_PER_S
    request = GenerateRequest(uuid.uuid4().hex, answer.tokens, sampling, deadline_ns=deadline_ns)
    async for event in pools.service.generate(request):
        if isinstance(event, TokenEvent):
            answer.last_ns = clock.monotonic_ns()
            answer.first_ns = answer.first_ns or answer.last_ns
            pieces = [stream.push(token) for token in event.tokens]
        else:
            answer.end = event
            pieces = [stream.finish()]
        answer.text += pieces
        if show:
            print("".join(pieces), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
