"""The engine of a worker: what is refused, aborted or broken ends alone and by name.

Its runner's tokens depend on every byte of KV, and the test pumps its wire.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from engine_bench import (
    PROMPT,
    WANTED,
    WORK,
    Bench,
    all_at_baseline,
    at_baseline,
    d_of,
    expected,
    limits,
    make_prompt,
    make_work,
    pair,
)
from kv_chain_runner import KvChainRunner

from vla_cloud.core.step_plan import Role
from vla_cloud.engine.runner import BatchError
from vla_cloud.engine.worker_engine import EngineConfig, WorkerEngine
from vla_cloud.pools import messages
from vla_common.clock import ManualClock

# -- refusing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work",
    [
        make_work([]),
        make_work(make_prompt(1, 256)),
        make_work([997]),
        make_work(PROMPT, 0),
        make_work(PROMPT, temperature=-1.0),
        make_work(PROMPT, seed=None),
    ],
)
def test_what_can_never_be_served_is_refused_before_any_work(work):
    bench = pair()
    bench.disaggregate("p", "d", "r", work)
    bench.send("p", messages.Prefill("r", 0, work, messages.Destination("d", "a", "t", 1, 0, [0], 1.0)))
    bench.settle()
    for worker in bench.workers.values():
        final = worker.of("r").final
        assert (type(final), final.code, final.retry_after_s) == (messages.Refused, "INVALID_ARGUMENT", 0.0)
        assert worker.runner.batches == 0
    all_at_baseline(bench)


@pytest.mark.parametrize(("first_block", "blocks"), [(0, [1, 2]), (1, [1] * 6), (7, []), (8, [1]), (0, [])])
def test_a_destination_that_cannot_take_the_prompt_is_refused(first_block, blocks):
    bench = pair()
    bench.send("p", messages.Prefill("r", 0, WORK, messages.Destination("d", "a", "t", 1, first_block, blocks, 1.0)))
    bench.settle()
    assert bench.workers["p"].of("r").final.code == "INVALID_ARGUMENT"
    all_at_baseline(bench)


def test_a_full_queue_refuses_at_once_and_says_when_to_come_again():
    bench = pair(max_waiting=2, num_blocks=8)
    bench.hold_prefill = True
    for i in range(5):
        bench.disaggregate("p", "d", f"r{i}", WORK)
        d_of(bench).engine.step() if i == 0 else None
    bench.settle()
    codes = [getattr(d_of(bench).of(f"r{i}").final, "code", None) for i in range(5)]
    assert codes == [None, None, None, "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
    assert d_of(bench).of("r4").final.retry_after_s > 0


def test_work_of_another_role_is_refused():
    bench = pair()
    bench.add("w", Role.BOTH)
    destination = messages.Destination("d", "a", "t", 1, 0, [0], 1.0)
    for name, message in [
        ("p", messages.Reserve("r", 0, WORK, "p", 1.0)),
        ("p", messages.Generate("r", 1, WORK)),
        ("d", messages.Prefill("r", 0, WORK, destination)),
        ("w", messages.Reserve("r", 0, WORK, "p", 1.0)),
        ("w", messages.Prefill("r", 1, WORK, destination)),
    ]:
        bench.send(name, message)
        bench.collect()
        assert bench.workers[name].of("r", message.attempt).final.code == "FAILED_PRECONDITION"
    with pytest.raises(ValueError, match="wrong connectors"):
        WorkerEngine(KvChainRunner(8, max_model_len=256), EngineConfig(limits(Role.DECODE)), ManualClock())
    with pytest.raises(ValueError, match="max_model_len"):
        WorkerEngine(KvChainRunner(8, max_model_len=16), EngineConfig(limits(Role.BOTH)), ManualClock())


def test_the_same_attempt_twice_is_refused_and_another_attempt_is_other_work():
    bench = Bench()
    worker = bench.add("w", Role.BOTH)
    bench.generate("w", "r", WORK, 0)
    bench.generate("w", "r", WORK, 1)
    worker.engine.handle(messages.Generate("r", 0, WORK))
    refused = [event for event in worker.engine.events() if isinstance(event, messages.Refused)]
    assert [(event.attempt, event.code) for event in refused] == [(0, "ALREADY_EXISTS")]
    bench.settle()
    assert worker.of("r", 0).tokens == worker.of("r", 1).tokens == WANTED


def test_draining_refuses_new_work_finishes_the_old_and_says_so_once():
    bench = pair()
    bench.disaggregate("p", "d", "r", WORK)
    bench.step(0)
    for name in ("p", "d"):
        bench.send(name, messages.Drain())
    bench.generate("d", "late", WORK)
    bench.collect()
    assert d_of(bench).of("late").final.code == "UNAVAILABLE"
    assert not any(isinstance(event, messages.Drained) for event in d_of(bench).other)
    bench.settle()
    bench.settle()
    assert d_of(bench).of("r").tokens == WANTED
    for worker in bench.workers.values():
        assert sum(isinstance(event, messages.Drained) for event in worker.other) == 1


# -- aborts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(0, 16))
@pytest.mark.parametrize("name", ["p", "d", "w"])
def test_an_abort_in_any_state_ends_the_request_and_gives_the_blocks_back(name, steps):
    bench = pair()
    bench.add("w", Role.BOTH)
    bench.generate("w", "r", WORK)
    bench.disaggregate("p", "d", "r", WORK)
    for _ in range(steps):
        bench.step(operations=2)
    bench.send(name, messages.Abort("r", 0))
    bench.send(name, messages.Abort("r", 0))
    bench.settle()
    for worker in bench.workers.values():
        assert worker.of("r").final is not None or ("r", 0) not in worker.accepted
    told = d_of(bench).of("r")
    assert told.tokens == WANTED[: len(told.tokens)]
    all_at_baseline(bench)


def test_an_abort_of_the_unknown_is_answered():
    bench = Bench()
    worker = bench.add("w", Role.BOTH)
    worker.engine.handle(messages.Abort("r", 4))
    assert worker.engine.events() == [messages.Aborted("r", 4)]


# -- faults of the model ---------------------------------------------------------------------------------------------


def poison(request_id: str, named: bool = False):
    """A model that fails on one request, and says on which or does not."""

    def before_run(batch):
        for chunk in (*batch.prefill, *batch.decode):
            if chunk.request_id.endswith(request_id):
                text = "device-side assert"
                raise BatchError(chunk.request_id, text) if named else RuntimeError(text)

    return before_run


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("other_roles", [False, True])
def test_a_request_that_breaks_the_model_ends_alone_and_leaves_nothing_in_the_cache(other_roles, named):
    bench = pair()
    bench.add("w", Role.BOTH, chunk_tokens=256)
    target = bench.workers["p" if other_roles else "w"]
    target.runner.before_run = poison("bad", named)
    prompts = {name: make_prompt(i, 60 + i) for i, name in enumerate(["a", "bad", "b"])}
    for name, prompt in prompts.items():
        if other_roles:
            bench.disaggregate("p", "d", name, make_work(prompt))
        else:
            bench.generate("w", name, make_work(prompt))
    bench.settle()
    final = target.of("bad").final
    code = "INVALID_ARGUMENT" if named else "INTERNAL"
    assert (type(final), final.code) == (messages.Error, code) and "device-side" in final.message
    speaker = bench.workers["d"] if other_roles else target
    for name in ("a", "b"):
        assert speaker.of(name).tokens == expected(prompts[name])
    assert target.engine.failure is None
    if other_roles:
        assert d_of(bench).of("bad").final.transfer  # P's link said that it gave up
    all_at_baseline(bench)
    target.runner.before_run = None
    work = make_work(prompts["bad"])
    bench.disaggregate("p", "d", "bad", work, 1) if other_roles else bench.generate("w", "bad", work, 1)
    bench.settle()
    assert speaker.of("bad", 1).tokens == expected(prompts["bad"])


def test_layers_pushed_from_a_pass_that_failed_are_not_trusted():
    """The model fails after the first layer left for D: these transfers end, though a second pass succeeds."""
    bench = pair()
    runner = bench.workers["p"].runner
    run = runner.run
    failed = []

    def fail_once(batch, on_layer=None):
        def layer_then_fail(layer):
            on_layer(layer)
            failed.append(layer)
            raise RuntimeError("out of memory")

        return run(batch, layer_then_fail if on_layer is not None and not failed else on_layer)

    runner.run = fail_once
    prompts = [make_prompt(i, 60) for i in range(2)]
    for i, prompt in enumerate(prompts):
        bench.disaggregate("p", "d", f"r{i}", make_work(prompt))
    bench.settle()
    assert failed == [0]
    finals = [bench.workers["p"].of(f"r{i}").final for i in range(2)]
    assert all(isinstance(final, messages.PushFailed) and final.code == "INTERNAL" for final in finals)
    assert all(d_of(bench).of(f"r{i}").final.transfer for i in range(2))
    all_at_baseline(bench)
    for i, prompt in enumerate(prompts):
        bench.disaggregate("p", "d", f"r{i}", make_work(prompt), attempt=1)
    bench.settle()
    assert [d_of(bench).of(f"r{i}", 1).tokens for i in range(2)] == [expected(prompt) for prompt in prompts]


def test_a_model_that_fails_on_everything_ends_the_worker_and_every_request_by_name():
    bench = Bench()
    worker = bench.add("w", Role.BOTH, max_partial_prefills=2, max_long_prefills=1)
    worker.runner.before_run = poison("")
    for i in range(12):
        bench.generate("w", f"r{i}", make_work(make_prompt(i, 20)))
    while worker.engine.step():
        pass
    bench.collect()
    assert all(worker.of(f"r{i}").final.code == "INTERNAL" for i in range(12))
    assert worker.other[-1].request_id == "" and worker.other[-1].code == "INTERNAL"
    assert worker.engine.failure is not None
    worker.engine.handle(messages.Ping(1))
    assert not worker.engine.step() and worker.engine.events() == []


def test_one_request_alone_that_fails_does_not_end_the_worker():
    bench = Bench()
    worker = bench.add("w", Role.BOTH)
    for i in range(6):
        worker.runner.before_run = poison("bad")
        bench.generate("w", f"{i}bad", WORK)
        bench.settle()
        assert worker.of(f"{i}bad").final.code == "INTERNAL"
        worker.runner.before_run = None
        bench.generate("w", f"{i}good", WORK)
        bench.settle()
        assert worker.of(f"{i}good").tokens == WANTED
    at_baseline(worker)


def test_a_fault_of_the_engine_itself_ends_the_worker_with_every_request_told():
    bench = Bench()
    worker = bench.add("w", Role.BOTH)
    bench.generate("w", "r", WORK)
    bench.step()
    worker.engine.scheduler.commit = None
    bench.collect()
    while worker.engine.step():
        pass
    bench.collect()
    assert worker.of("r").final.code == "INTERNAL"
    assert worker.other[-1].request_id == ""


def test_a_failed_host_swap_ends_what_was_to_come_in_and_nothing_else_reads_it():
    bench = Bench()
    worker = bench.add("w", Role.BOTH, num_blocks=16, host_blocks=64)
    broken = []

    def no_memory(blocks, data):
        broken.append(len(blocks))
        raise OSError("pinned memory")

    worker.runner.copy_blocks_in = no_memory
    prompts = [make_prompt(i, 40 + i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        bench.generate("w", f"r{i}", make_work(prompt, 60))
    bench.settle()
    assert broken
    for i, prompt in enumerate(prompts):
        told = worker.of(f"r{i}")
        assert told.tokens == expected(prompt, 60)[: len(told.tokens)]
        assert isinstance(told.final, messages.Finished | messages.Error)
    if worker.engine.failure is None:
        at_baseline(worker)
