"""Grammars in a worker's engine: masks follow the answer through compilation, transfer, preemption and resumption."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from engine_bench import Bench, all_at_baseline, at_baseline, expected, make_prompt, make_work
from grammar_walk import CountingBackend

from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.core.step_plan import Role
from vla_cloud.pools import messages

STOP = 996
PROMPT = make_prompt(1, 60)


def grammar(seed: int, count: int = 12) -> tuple[Grammar, list[list[int]]]:
    """Two to four tokens allowed at each place."""
    places = [sorted({(seed * 31 + place * 7 + i * 101) % 990 for i in range(2 + place % 3)}) for place in range(count)]
    return Grammar("json_schema", json.dumps(places)), places


def work(seed: int, prompt: list[int] = PROMPT, count: int = 40, **changes: Any) -> messages.Work:
    return make_work(prompt, count, stop_token_ids=frozenset([STOP]), grammar=grammar(seed)[0], **changes)


def fits(tokens: list[int], seed: int) -> bool:
    places = grammar(seed)[1]
    return len(tokens) == len(places) + 1 and tokens[-1] == STOP and all(t in p for t, p in zip(tokens, places, strict=False))


def finish(bench: Bench) -> None:
    """Settle, and wait for what is compiled in threads, which may make work at any moment."""
    for _ in range(2000):
        while bench.step():
            pass
        if not any(worker.engine._intake.holds_any for worker in bench.workers.values()):
            bench.settle()
            return
        time.sleep(0.002)
    raise AssertionError("a grammar was never compiled")


def close(bench: Bench) -> None:
    for worker in bench.workers.values():
        worker.engine.close()


def test_answers_fit_their_grammars_and_others_are_untouched() -> None:
    bench, backend = Bench(), CountingBackend()
    w = bench.add("w", Role.BOTH, grammars=backend)
    for seed in range(3):
        bench.generate("w", f"g{seed}", work(seed, make_prompt(seed, 50)))
    bench.generate("w", "plain", make_work(make_prompt(9, 50), 20))
    finish(bench)
    assert all(fits(w.of(f"g{seed}").tokens, seed) and w.of(f"g{seed}").final.reason == "stop" for seed in range(3))
    assert w.of("plain").tokens == expected(make_prompt(9, 50), 20)
    assert len(w.engine.grammars) == 0
    at_baseline(w)
    close(bench)


def test_a_grammar_is_compiled_once_and_work_waits_for_it_alone() -> None:
    gate = threading.Event()
    bench, backend = Bench(), CountingBackend(gate)
    w = bench.add("w", Role.BOTH, grammars=backend)
    bench.generate("w", "a", work(1))
    bench.generate("w", "b", work(1, make_prompt(2, 30)))
    bench.generate("w", "plain", make_work(PROMPT, 5))
    bench.settle()
    assert w.of("plain").final.reason == "length" and w.of("a").final is None and w.engine._intake.holds_any
    bench.send("w", messages.Drain())
    bench.settle()
    assert not any(isinstance(event, messages.Drained) for event in w.other), "accepted work is waited for"
    gate.set()
    finish(bench)
    assert fits(w.of("a").tokens, 1) and fits(w.of("b").tokens, 1) and len(backend.compiled) == 1
    assert any(isinstance(event, messages.Drained) for event in w.other)
    close(bench)


def test_the_worker_wakes_up_when_a_grammar_is_compiled() -> None:
    import select

    gate = threading.Event()
    bench = Bench()
    w = bench.add("w", Role.BOTH, grammars=CountingBackend(gate))
    bench.generate("w", "a", work(1))
    bench.settle()
    fds = w.engine.wait_fds()
    assert len(fds) == 1 and not select.select(fds, [], [], 0)[0]
    gate.set()
    assert select.select(fds, [], [], 10)[0] == fds
    finish(bench)
    assert fits(w.of("a").tokens, 1)
    for _ in range(1000):  # the thread that compiled may have told half of it
        bench.settle()
        if not select.select(fds, [], [], 0)[0]:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("it would never sleep again")
    close(bench)


def test_what_waits_for_its_grammar_can_be_aborted_and_runs_out_of_time() -> None:
    gate = threading.Event()
    bench = Bench()
    w = bench.add("w", Role.BOTH, grammars=CountingBackend(gate))
    bench.generate("w", "a", work(1))
    bench.generate("w", "late", work(1, time_left_s=2.0))
    bench.generate("w", "a", work(1))
    bench.collect()
    assert w.of("a").final.code == "ALREADY_EXISTS"
    w.told.clear()
    bench.send("w", messages.Abort("a", 0))
    bench.settle()
    assert isinstance(w.of("a").final, messages.Aborted)
    assert w.engine.wait_s() == pytest.approx(2.0)
    bench.advance(2.5)
    bench.settle()
    assert w.of("late").final.code == "DEADLINE_EXCEEDED"
    gate.set()
    finish(bench)
    at_baseline(w)
    close(bench)


def test_a_failing_engine_ends_what_waits() -> None:
    gate = threading.Event()
    bench = Bench()
    w = bench.add("w", Role.BOTH, grammars=CountingBackend(gate))
    bench.generate("w", "a", work(1))
    bench.settle()
    gate.set()
    w.engine.fail("broken")
    bench.collect()
    assert isinstance(w.of("a").final, messages.Refused) and w.of("a").final.code == "UNAVAILABLE", "another may take it"


def test_without_a_library_and_for_a_bad_grammar_the_request_is_refused() -> None:
    bench = Bench()
    w, bad = bench.add("w", Role.BOTH), bench.add("bad", Role.BOTH, grammars=CountingBackend())
    bench.generate("w", "a", work(1))
    bench.collect()
    assert w.of("a").final.code == "INVALID_ARGUMENT" and "vla-runtime[structured]" in w.of("a").final.message
    for request_id in ("a", "b"):
        bench.generate("bad", request_id, make_work(PROMPT, 4, stop_token_ids=frozenset([STOP]), grammar=Grammar("json_schema", "bad")))
        finish(bench)
        assert isinstance(bad.of(request_id).final, messages.Refused) and "cannot be compiled" in bad.of(request_id).final.message
    close(bench)


def test_a_first_token_from_p_and_the_rest_on_d() -> None:
    bench = Bench()
    bench.add("p", Role.PREFILL, grammars=CountingBackend())
    d = bench.add("d", Role.DECODE, grammars=CountingBackend())
    for seed in range(3):
        bench.disaggregate("p", "d", f"r{seed}", work(seed, make_prompt(seed, 70)))
        finish(bench)
        assert fits(d.of(f"r{seed}").tokens, seed)
    all_at_baseline(bench)
    close(bench)


def test_the_same_tokens_wherever_it_runs_and_however_often_it_is_preempted() -> None:
    def run(num_blocks: int, **changes: Any) -> tuple[list[list[int]], int]:
        bench = Bench()
        w = bench.add("w", Role.BOTH, num_blocks, grammars=CountingBackend(), **changes)
        for seed in range(4):
            long = make_work(make_prompt(seed, 40), 60, stop_token_ids=frozenset([STOP]), grammar=grammar(seed, 50)[0])
            bench.generate("w", f"r{seed}", long)
        finish(bench)
        close(bench)
        return [w.of(f"r{seed}").tokens for seed in range(4)], sum(w.of(f"r{seed}").final.preemptions for seed in range(4))

    roomy, none = run(64)
    tight, some = run(16)
    swapped, more = run(16, host_blocks=64)
    assert none == 0 and some > 0 and more > 0 and roomy == tight == swapped
    assert all(len(tokens) == 51 and tokens[-1] == STOP for tokens in roomy)


def test_an_answer_goes_on_where_a_dead_worker_left_it() -> None:
    alone = Bench()
    w = alone.add("w", Role.BOTH, grammars=CountingBackend())
    alone.generate("w", "r", work(5))
    finish(alone)
    whole = w.of("r").tokens
    close(alone)
    bench = Bench()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE), ("b", Role.BOTH)):
        bench.add(name, role, grammars=CountingBackend())
    bench.disaggregate("p", "d", "r", work(5))
    d = bench.workers["d"]
    for _ in range(5000):
        bench.step(4)
        if len(d.of("r").tokens) >= 5:
            break
        time.sleep(0.0005)
    had = d.of("r").tokens
    assert 5 <= len(had) < len(whole) and had == whole[: len(had)]
    d.engine.close()
    bench.kill("d")
    rest = work(5, PROMPT + had, 40 - len(had), streamed=len(had))
    bench.disaggregate("p", "e", "r", rest, attempt=1)
    bench.generate("b", "r", rest, attempt=2)
    finish(bench)
    assert had + bench.workers["e"].of("r", 1).tokens == whole == had + bench.workers["b"].of("r", 2).tokens
    close(bench)


def test_tokens_that_do_not_fit_and_dead_ends_end_the_request_alone() -> None:
    bench = Bench()
    w = bench.add("w", Role.BOTH, grammars=CountingBackend())
    bench.generate("w", "wrong", work(1, [*PROMPT, 995], streamed=1))
    nothing = Grammar("json_schema", "[[5], []]")
    bench.generate("w", "dead", make_work(PROMPT, 9, stop_token_ids=frozenset([STOP]), grammar=nothing))
    bench.generate("w", "right", work(2))
    finish(bench)
    assert w.of("wrong").final.code == "INTERNAL" and "does not fit its grammar" in w.of("wrong").final.message
    assert w.of("dead").final.code == "INVALID_ARGUMENT" and w.of("dead").tokens == [5]
    assert fits(w.of("right").tokens, 2)
    at_baseline(w)
    close(bench)


def test_max_tokens_cuts_the_answer() -> None:
    bench = Bench()
    w = bench.add("w", Role.BOTH, grammars=CountingBackend())
    bench.generate("w", "r", work(1, count=4))
    finish(bench)
    assert len(w.of("r").tokens) == 4 and w.of("r").final.reason == "length"
    close(bench)
