"""Real worker processes that die, stop, hang or cannot start: requests end with the right tokens, or an error by name.

The hash-chain runner stands in for the model: its tokens are right only if every byte of KV is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace

import pytest
from serving_rig import PROMPT, RULES, SLOW, SLOW_STEP, chosen, prompt, reference, rig, stage

from vla_cloud.core.generate import GenerateRequest, RequestError, SamplingParams
from vla_cloud.pools.events import TokenEvent
from vla_models.sampling import SamplingRule


@pytest.mark.parametrize("phase", ["idle", "prefill", "decode"])
def test_p_killed_in_each_phase(phase: str) -> None:  # sglang#6215: a P fails, another takes over
    async def go() -> None:
        async with rig(per_worker=SLOW, prefill_workers=2) as it:
            if phase == "idle":
                it.kill("p0")
            decoding = asyncio.Event()
            task = asyncio.create_task(it.ask(PROMPT, 20, on_event=lambda n: decoding.set()))
            if phase == "prefill":
                await it.until(lambda: stage(it) == "prefilling")
                await asyncio.sleep(0.1)
                it.kill(chosen(it, "prefill"))
            elif phase == "decode":
                await decoding.wait()
                it.kill(chosen(it, "prefill"))
            got, end = await task
            assert got == reference(PROMPT, 20)
            assert end.attempts == (2 if phase == "prefill" else 1) or phase == "idle"
            await it.until(lambda: all(info.state == "ready" for info in it.supervisor.infos()))
            await it.baseline()

    asyncio.run(go())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_d_killed_in_each_phase(phase: str) -> None:
    async def go() -> None:
        async with rig(per_worker=SLOW, decode_workers=2) as it:
            decoding = asyncio.Event()
            task = asyncio.create_task(it.ask(PROMPT, 30, on_event=lambda n: n > 5 and decoding.set()))
            if phase == "prefill":
                await it.until(lambda: stage(it) == "prefilling")
            else:
                await decoding.wait()
            it.kill(chosen(it, "decode"))
            got, end = await task
            assert got == reference(PROMPT, 30)
            assert end.attempts == 2
            if phase == "decode":
                assert end.cached_tokens == 0  # of the attempt that gave the first token
            await it.until(lambda: all(info.state == "ready" for info in it.supervisor.infos()))
            await it.baseline()

    asyncio.run(go())


def test_sampling_and_log_probabilities_survive_the_death_of_d() -> None:
    params = SamplingParams(temperature=0.7, seed=5, logprobs=2, max_new_tokens=30)

    async def go() -> None:
        async with rig(per_worker=SLOW, decode_workers=2) as it:
            tokens: list[int] = []
            logprobs: list[float] = []
            top: list[tuple[tuple[int, float], ...]] = []
            async for event in it.service.generate(GenerateRequest("r", tuple(PROMPT), params)):
                if isinstance(event, TokenEvent):
                    if len(tokens) < 10 <= len(tokens) + len(event.tokens):
                        it.kill(chosen(it, "decode"))
                    tokens.extend(event.tokens)
                    logprobs.extend(event.logprobs)
                    top.extend(event.top_logprobs)
            assert tokens == reference(PROMPT, 30, SamplingRule(temperature=0.7, seed=5))
            assert event.attempts == 2 and len(logprobs) == len(top) == 30
            assert all(best[0] == (token, logprob) for token, logprob, best in zip(tokens, logprobs, top, strict=True))

    asyncio.run(go())


def test_the_only_workers_are_killed_and_the_request_goes_on_when_they_are_back() -> None:
    async def go() -> None:
        async with rig(environment=SLOW_STEP) as it:
            decoding = asyncio.Event()
            task = asyncio.create_task(it.ask(PROMPT, 30, on_event=lambda n: n > 5 and decoding.set()))
            await decoding.wait()
            it.kill("p0")
            it.kill("d0")
            got, end = await task
            assert got == reference(PROMPT, 30) and end.attempts >= 2

    asyncio.run(go())


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_what_is_known_of_a_dead_peer_goes_with_it(name: str, transfer: str) -> None:  # sglang#6215
    async def go() -> None:
        async with rig(transfer=transfer) as it:
            assert (await it.ask(PROMPT, 3, "before"))[0] == reference(PROMPT, 3)
            pid = it.pid(name)
            it.kill(name)
            await it.until(lambda: it.state(name) == "ready" and it.pid(name) != pid)
            for i in range(3):
                got, end = await it.ask(prompt(i), 5, f"r{i}")
                assert got == reference(prompt(i), 5) and end.attempts == 1
            await it.baseline()

    asyncio.run(go())


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_stopped_worker_is_noticed_and_killed(kind: str) -> None:
    async def go() -> None:
        impatient = replace(RULES, hang_s=5.0)
        async with rig(per_worker=SLOW, prefill_workers=2, decode_workers=2, supervisor=impatient) as it:
            decoding = asyncio.Event()
            task = asyncio.create_task(it.ask(PROMPT, 30, on_event=lambda n: n > 5 and decoding.set()))
            await (it.until(lambda: stage(it) == "prefilling") if kind == "prefill" else decoding.wait())
            victim = chosen(it, kind)
            pid = it.pid(victim)
            it.kill(victim, signal.SIGSTOP)
            got, end = await task
            assert got == reference(PROMPT, 30) and end.attempts == 2
            await it.until(lambda: it.state(victim) == "ready" and it.pid(victim) != pid)
            await it.baseline()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(go())


def test_worker_churn_never_hangs_a_request() -> None:  # dynamo#13088
    async def go() -> None:
        ends: list[str] = []
        async with rig(prefill_workers=2, decode_workers=2, environment={"CHAIN_STEP_S": "0.002"}) as it:

            async def one(i: int) -> None:
                try:
                    got, _ = await asyncio.wait_for(it.ask(prompt(i), 20, f"r{i}"), 125.0)  # a hang fails the test
                    assert got == reference(prompt(i), 20)
                    ends.append("ok")
                except RequestError as error:
                    ends.append(error.code)

            async def churn() -> None:
                for i in range(20):
                    name = ["p0", "d1", "p1", "d0"][i % 4]
                    if it.state(name) == "ready":
                        it.kill(name)
                    await asyncio.sleep(0.15)

            killer = asyncio.create_task(churn())
            tasks = []
            for i in range(60):
                tasks.append(asyncio.create_task(one(i)))
                await asyncio.sleep(0.05)
            await asyncio.gather(*tasks)
            await killer
            assert len(ends) == 60 and set(ends) <= {"ok", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
            assert ends.count("ok") >= 30
            await it.until(lambda: all(info.state == "ready" for info in it.supervisor.infos()))
            await it.baseline()

    asyncio.run(go())


def test_one_worker_is_drained_and_replaced_without_a_failed_request() -> None:
    async def go() -> None:
        async with rig(colocated=True, workers=2, environment=SLOW_STEP) as it:
            tasks = [asyncio.create_task(it.ask(prompt(i), 20, f"r{i}")) for i in range(6)]
            await it.until(lambda: it.service.health()["active"] == 6)
            pid = it.pid("w0")
            it.supervisor.drain("w0")
            tasks += [asyncio.create_task(it.ask(prompt(i), 20, f"r{i}")) for i in range(6, 12)]
            for i, (got, _) in enumerate(await asyncio.gather(*tasks)):
                assert got == reference(prompt(i), 20)
            await it.until(lambda: it.state("w0") == "ready" and it.pid("w0") != pid)

    asyncio.run(go())


def test_a_worker_that_cannot_load_is_not_started_again() -> None:
    async def go() -> None:
        async with rig(model="unloadable", wait=False) as it:
            assert not await it.supervisor.wait_ready(120.0)
            assert it.state("p0") == "failed" or it.state("d0") == "failed"
            with pytest.raises(RequestError, match="no worker") as caught:
                await it.ask([1], 1)
            assert caught.value.code == "UNAVAILABLE" and caught.value.retry_after_s > 0

    asyncio.run(go())


def test_a_worker_of_another_protocol_version_is_not_started_again() -> None:
    async def go() -> None:
        async with rig(colocated=True, environment={"CHAIN_OTHER_VERSION": "1"}, wait=False) as it:
            assert not await it.supervisor.wait_ready(120.0)
            info = it.supervisor.infos()[0]
            assert (info.state, info.restarts) == ("failed", 0) and "install one version" in info.detail

    asyncio.run(go())


def test_a_worker_that_crashes_is_started_again_ever_later() -> None:
    async def go() -> None:
        async with rig(model="crash", colocated=True, wait=False) as it:
            await it.until(lambda: it.supervisor.infos()[0].restarts >= 3)
            backoff = it.supervisor._processes[0].backoff
            assert backoff.delay_s >= 0.2  # 0.05, 0.1, 0.2, ...

    asyncio.run(go())


def test_a_prefill_that_outlasts_the_lease_is_kept_alive_by_heartbeats() -> None:
    async def go() -> None:
        slow = {"p0": {"CHAIN_TOKEN_S": "0.03"}}  # 6 s for the prompt
        async with rig(per_worker=slow, lease_s=5.0, lease_extend_s=0.5) as it:
            got, end = await it.ask(PROMPT, 3)
            assert got == reference(PROMPT, 3) and end.attempts == 1

    asyncio.run(go())


def test_strangers_at_the_control_socket_do_no_harm() -> None:
    async def go() -> None:
        async with rig() as it:
            path = it.supervisor._server.address.removeprefix("unix:")
            for data in (b"\xff" * 100, b"\x05\x00\x00\x00hello", b""):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(path)
                    stranger.sendall(data)
            assert (await it.ask(PROMPT, 5))[0] == reference(PROMPT, 5)

    asyncio.run(go())
