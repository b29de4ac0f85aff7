"""The engine of a worker: every path gives the tokens of the plain loop.

Its runner's tokens depend on every byte of KV, and the test pumps its wire.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from engine_bench import PROMPT, WANTED, WORK, Bench, all_at_baseline, d_of, expected, make_prompt, make_work, pair

from vla_cloud.core.block_pool import blocks_for
from vla_cloud.core.generate import MAX_LOGPROBS
from vla_cloud.core.step_plan import Role
from vla_cloud.pools import messages
from vla_models.sampling import SamplingRule

# -- the same tokens on every path -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 248])
def test_every_path_gives_the_tokens_of_the_plain_loop(length):
    prompt = make_prompt(length, length)
    work, wanted = make_work(prompt), expected(prompt)
    bench = pair()
    whole = bench.add("whole", Role.BOTH, chunk_tokens=256)
    chunked = bench.add("chunked", Role.BOTH, chunk_tokens=16, max_partial_prefills=1, max_long_prefills=1)
    for attempt in (0, 1):  # the second finds the prompt in each cache
        bench.generate("whole", "r", work, attempt)
        bench.generate("chunked", "r", work, attempt)
        bench.disaggregate("p", "d", "r", work, attempt)
        bench.settle()
        for worker in (whole, chunked, d_of(bench)):
            assert worker.of("r", attempt).tokens == wanted, (worker.name, attempt)
            cached = (length - 1) // 16 * 16 if attempt else 0
            assert worker.of("r", attempt).final == messages.Finished("r", attempt, "length", 8, cached)
    all_at_baseline(bench)


def test_what_d_has_cached_is_not_pushed_again():
    bench = pair()
    bench.disaggregate("p", "d", "r", WORK)
    bench.settle()
    sender = bench.workers["p"].end
    assert sender.writes == 2 * 7
    longer = PROMPT + WANTED + make_prompt(2, 20)
    bench.disaggregate("p", "d", "s", make_work(longer))
    bench.settle()
    told = d_of(bench).of("s")
    assert told.tokens == expected(longer)
    assert told.reserved.first_block == 6 and told.reserved.cached_tokens == 96
    assert sender.writes == 2 * 7 + 2 * (blocks_for(len(longer)) - 6)
    assert bench.workers["p"].of("s").final.pushed_bytes == 2 * 512 * (blocks_for(len(longer)) - 6)
    all_at_baseline(bench)


def watch_pushes(bench: Bench) -> list[tuple[range, int]]:
    """(layers, count of blocks) of each push from now on."""
    seen: list[tuple[range, int]] = []
    sender = bench.workers["p"].end
    push = sender.push

    def watched(token, layers, local, remote):
        seen.append((layers, len(local)))
        push(token, layers, local, remote)

    sender.push = watched
    return seen


def test_what_p_has_cached_leaves_before_the_rest_is_computed_above_the_threshold_only():
    for uncached, pushes in [(40, [(range(0, 2), 9)]), (48, [(range(0, 2), 6), (range(0, 1), 3), (range(1, 2), 3)])]:
        bench = pair()
        bench.disaggregate("p", "d", "r", WORK)
        bench.settle()
        d2 = bench.add("d2", Role.DECODE)
        prompt = PROMPT[:96] + make_prompt(3, uncached)
        seen = watch_pushes(bench)
        bench.disaggregate("p", "d2", "s", make_work(prompt))
        bench.settle()
        assert d2.of("s").tokens == expected(prompt)
        assert seen == pushes


def test_kv_leaves_while_the_prompt_is_computed_above_the_threshold_only():
    sent = {}
    for length in (47, 100):  # the threshold is 48
        bench = pair()
        bench.disaggregate("p", "d", "r", make_work(make_prompt(1, length)))
        seen = watch_pushes(bench)
        bench.settle()
        sent[length] = seen
        assert d_of(bench).of("r").tokens == expected(make_prompt(1, length))
    assert sent[47] == [(range(0, 2), 3)]
    assert sent[100] == [(range(0, 1), 3), (range(1, 2), 3)] * 2 + [(range(0, 1), 1), (range(1, 2), 1)]


def test_tokens_of_a_step_come_in_one_message():
    bench = Bench()
    worker = bench.add("w", Role.BOTH, chunk_tokens=256)
    for i in range(4):
        bench.generate("w", f"r{i}", make_work(make_prompt(i, 20)))
    batches = []
    while worker.engine.step():
        batches += [len(event.rows) for event in worker.engine.events() if isinstance(event, messages.Tokens)]
    assert batches == [3, 4, 4, 4, 4, 4, 4, 4, 1]  # three prompts at a time


def test_the_first_token_and_a_reservation_do_not_wait_for_the_step_of_others():
    bench = pair()
    bench.generate("d", "other", make_work(make_prompt(2, 20), 100))
    bench.until(lambda: len(d_of(bench).of("other").tokens) > 1)
    runner = d_of(bench).runner
    bench.send("d", messages.Reserve("r", 0, WORK, "p", 30.0))
    before = runner.batches
    assert d_of(bench).engine.step()
    assert [type(event) for event in d_of(bench).engine.events()] == [messages.Reserved]
    assert runner.batches == before
    assert d_of(bench).engine.step()
    assert runner.batches == before + 1


@pytest.mark.parametrize("rule", [{"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.2}])
def test_sampling_goes_on_alike_elsewhere(rule):
    wanted = expected(PROMPT, 12, rule=SamplingRule(**{"seed": 7, **rule}))
    assert wanted != expected(PROMPT, 12)
    bench = pair()
    bench.add("w", Role.BOTH)
    bench.disaggregate("p", "d", "r", make_work(PROMPT, 12, **rule))
    bench.generate("w", "r", make_work(PROMPT, 12, **rule))
    bench.settle()
    assert d_of(bench).of("r").tokens == bench.workers["w"].of("r").tokens == wanted
    bench.generate("w", "moved", make_work(PROMPT + wanted[:5], 7, streamed=5, **rule))
    bench.settle()
    assert bench.workers["w"].of("moved").tokens == wanted[5:]


def test_logprobs_of_the_first_token_travel_with_the_notice():
    bench = pair()
    bench.add("w", Role.BOTH)
    work = make_work(PROMPT, logprobs=MAX_LOGPROBS)
    bench.disaggregate("p", "d", "r", work)
    bench.generate("w", "r", work)
    bench.settle()
    there, here = d_of(bench).of("r"), bench.workers["w"].of("r")
    assert there.logprobs == here.logprobs and len(there.logprobs) == 8


def test_a_stop_token_ends_the_answer_on_every_path_even_if_it_is_the_first():
    for at in (0, 3):
        stop = frozenset({WANTED[at]})
        bench = pair()
        bench.add("w", Role.BOTH)
        bench.disaggregate("p", "d", "r", make_work(PROMPT, stop_token_ids=stop))
        bench.generate("w", "r", make_work(PROMPT, stop_token_ids=stop))
        bench.settle()
        for worker in (d_of(bench), bench.workers["w"]):
            assert worker.of("r").tokens == WANTED[: at + 1]
            assert worker.of("r").final.reason == "stop" and worker.of("r").final.generated_tokens == at + 1
        all_at_baseline(bench)


# -- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 64], ids=["recompute", "swap"])
@pytest.mark.parametrize("path", ["generate", "disaggregate"])
def test_preempted_and_resumed_requests_give_the_same_tokens(path, host_blocks):
    bench = Bench()
    bench.add("p", Role.PREFILL)
    worker = bench.add("d", Role.DECODE, num_blocks=16, host_blocks=host_blocks)
    prompts = [make_prompt(i, 40 + i) for i in range(5)]
    for i, prompt in enumerate(prompts):
        if path == "generate":
            bench.generate("d", f"r{i}", make_work(prompt, 60))
        else:
            bench.disaggregate("p", "d", f"r{i}", make_work(prompt, 60))
    bench.settle()
    preemptions = 0
    for i, prompt in enumerate(prompts):
        told = worker.of(f"r{i}")
        assert told.tokens == expected(prompt, 60)
        preemptions += told.final.preemptions
    assert preemptions > 0
    assert preemptions == worker.engine.scheduler.load().preemptions
    all_at_baseline(bench)


def test_decode_out_of_memory_recomputes_or_fails_but_never_parks():  # sglang#6857
    """D's pool is full of what nobody gives back: the request ends at its deadline, by name."""
    bench = Bench()
    bench.add("p", Role.PREFILL)
    bench.add("d", Role.DECODE, num_blocks=14)
    bench.hold_prefill = True
    prompt = make_prompt(3, 16 * 7 - 4)
    bench.generate("d", "r", make_work(prompt, 60, time_left_s=20.0))
    bench.until(lambda: len(d_of(bench).of("r").tokens) > 1)
    bench.disaggregate("p", "d", "holder", make_work(make_prompt(4, 16 * 5), 4), lease_s=10.0)
    bench.settle()
    told = d_of(bench).of("r")
    assert told.final is None and len(told.tokens) < 60  # preempted: its own growth finds no block
    assert d_of(bench).of("holder").reserved is not None
    bench.advance(10.1)  # the reservation's lease ends
    bench.settle()
    assert d_of(bench).of("holder").final.transfer
    assert told.tokens == expected(prompt, 60) and told.final.preemptions >= 1
    all_at_baseline(bench)


def test_a_request_that_finds_no_blocks_ends_at_its_deadline():
    bench = Bench()
    bench.add("p", Role.PREFILL)
    bench.add("d", Role.DECODE, num_blocks=8)
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "holder", make_work(make_prompt(4, 16 * 7), 4), lease_s=1000.0)
    bench.generate("d", "r", make_work(make_prompt(5, 60), 4, time_left_s=3.0))
    bench.settle()
    assert d_of(bench).engine.wait_s() == pytest.approx(3.0)
    bench.advance(3.0)
    bench.settle()
    final = d_of(bench).of("r").final
    assert (final.code, final.transfer) == ("DEADLINE_EXCEEDED", False)
