"""Runs under another engine's Python, so it may import nothing of ours: reads jobs from stdin, answers with seconds.

    <python of the engine> child.py vllm|openvino <model>      a line of JSON each way, until the input ends

A job is {"prompts": [[token ids], ...], "steps": k}. With k = 0 the answer is the time to the first token of all
prompts, computed and not read from a prefix cache. With k > 0 prompts may come from the cache, and the answer is the
time until each has k more tokens, from the moment all have their first. With "profile": true (vllm), the answer holds
torch's table of operators as well.
"""

from __future__ import annotations

import json
import os
import sys
import time

MOST_SEQUENCES, CACHE_GIB = 32, 2
SLACK = 4
"""Tokens that a sequence which began earlier may be ahead without ending before the others."""


class Vllm:
    """Offline engine in this process; float32 like the model's folder."""

    def __init__(self, model: str) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        import torch
        from vllm import LLM, SamplingParams

        torch.set_num_threads(1)
        self.parameters = SamplingParams
        self.engine = LLM(
            model=model, dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=True,
            max_num_seqs=MOST_SEQUENCES,
        ).llm_engine  # fmt: skip
        self.count: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], tokens: int, cached: bool) -> None:
        rule = self.parameters(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=not cached
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, rule)
        self.count[name] = 0

    def step(self) -> None:
        for output in self.engine.step():
            self.count[output.request_id] = len(output.outputs[0].token_ids)

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.count.clear()


class OpenVino:
    """Continuous batching over a GGUF file, weights and arithmetic as the engine likes them."""

    def __init__(self, model: str) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.tensor, self.configuration = numpy, openvino.Tensor, openvino_genai.GenerationConfig
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = CACHE_GIB, MOST_SEQUENCES
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2048
        self.engine = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1})
        self.count: dict[str, int] = {}
        self.handles: dict[str, object] = {}

    def add(self, name: str, prompt: list[int], tokens: int, cached: bool) -> None:
        # There is no way to pass the cache by: prompts to be computed are new ones each time.
        rule = self.configuration(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        ids = self.tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
        self.handles[name] = self.engine.add_request(len(self.handles), ids, rule)
        self.count[name] = 0

    def step(self) -> None:
        self.engine.step()
        for name, handle in self.handles.items():
            if handle.can_read():
                self.count[name] += sum(len(output.generated_ids) for output in handle.read().values())

    def drain(self) -> None:
        while self.engine.has_non_finished_requests():
            self.engine.step()
        self.count.clear()
        self.handles.clear()


def answer(engine: Vllm | OpenVino, job: dict, number: int) -> dict[str, float]:
    steps, prompts = job["steps"], job["prompts"]
    if steps:
        submit(engine, f"{number}-first", prompts, 1, cached=True)
        engine.drain()  # now the cache has the prompts, and all of them begin to decode in the same step or the next
    begin = time.perf_counter(), time.process_time()
    submit(engine, str(number), prompts, steps + SLACK, cached=steps > 0)
    run_until(engine, 1)
    if steps:
        begin = time.perf_counter(), time.process_time()
        run_until(engine, min(engine.count.values()) + steps)
    found = {"wall_s": time.perf_counter() - begin[0], "cpu_s": time.process_time() - begin[1]}
    if steps and max(engine.count.values()) >= steps + SLACK:
        raise RuntimeError("a sequence ended before the last step was measured")
    engine.drain()
    return found


def profiled(engine: Vllm | OpenVino, job: dict, number: int) -> dict[str, object]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        took = answer(engine, job, number)
    table = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=60)
    return {**took, "profile": table}


def submit(engine: Vllm | OpenVino, name: str, prompts: list[list[int]], tokens: int, cached: bool) -> None:
    for index, prompt in enumerate(prompts):
        engine.add(f"{name}-{index}", prompt, tokens, cached)


def run_until(engine: Vllm | OpenVino, tokens: int) -> None:
    while min(engine.count.values()) < tokens:
        engine.step()


def main() -> None:
    # Engines print what they like: our answers go where only we write.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = {"vllm": Vllm, "openvino": OpenVino}[sys.argv[1]](sys.argv[2])
    print("{}", file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        work = profiled if job.get("profile") else answer
        print(json.dumps(work(engine, job, number)), file=answers, flush=True)
    os._exit(0)  # some engines leave threads that would keep the process


if __name__ == "__main__":
    main()
