"""The context service on a clock that a test moves, with a tiny random backbone and bytes as they come from the wire."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_cloud.config import ContextConfig
from vla_cloud.context.images import decode_jpeg
from vla_cloud.context.runner import ContextRunner, PreparedObservation
from vla_cloud.context.service import ContextService
from vla_cloud.core import validation
from vla_common import tensors, wire
from vla_common.clock import ManualClock
from vla_common.zenoh_session import Received
from vla_models.text import tokenize

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from context_rig import CAMERA, MANIFEST, MS, REFUSALS, VOCABULARY, jpeg, key, observation, tiny_vlm


class Bench:
    def __init__(self, **config: object) -> None:
        self.clock = ManualClock(start_ns=10**12)
        self.vlm = tiny_vlm()
        self.runner = ContextRunner(self.vlm, MANIFEST, prefix_cache_tokens=64, max_image_bytes=8192)
        self.sent: list[tuple[str, bytes]] = []
        self.service = ContextService(self.runner, MANIFEST, lambda robot, payload: self.sent.append((robot, payload)),
                                      self.clock, ContextConfig(**config))  # type: ignore[arg-type]

    def receive(self, robot: str, payload: bytes) -> None:
        self.service.receive(Received(payload, None, self.clock.monotonic_ns(), key(robot)))

    def answers(self) -> dict[str, object]:
        while self.service.step():
            pass
        decoded = {robot: wire.decode("ContextTokens", payload) for robot, payload in self.sent}
        self.sent.clear()
        return decoded

    @property
    def refused(self) -> dict[str, int]:
        return self.service.statistics.refused.snapshot()


def test_context_echoes_the_observation_and_equals_the_model() -> None:
    bench = Bench()
    bench.receive("panda", observation(7, stamp_ns=5_000_000_123))
    bench.clock.advance_ns(20 * MS)
    context = bench.answers()["panda"]
    assert wire.stamp_ns(context.header) == 5_000_000_123
    assert (context.session, context.sequence, context.model_id) == ("s", 7, "tiny")
    assert context.model_hash.tobytes() == MANIFEST.model_hash
    assert np.array_equal(context.instruction_hash, wire.instruction_hash("touch the red cube"))
    assert context.compute_s == pytest.approx(0.02)
    ids = torch.tensor([tokenize("touch the red cube", VOCABULARY, 8)])
    pixels = torch.tensor(decode_jpeg(jpeg(), CAMERA, 8192))[None]
    with torch.no_grad():
        expected = bench.vlm(ids, pixels)[0]
    np.testing.assert_allclose(tensors.tokens_of(context), expected.numpy(), atol=1e-4)


def test_batch_of_robots_equals_one_by_one_whatever_the_cache_holds() -> None:
    bench = Bench()
    words = ["touch the red cube", "touch the blue cube", "pick the red cube", "touch the red cube"]
    batch = []
    for i, text in enumerate(words):
        ids = tuple(tokenize(text, VOCABULARY, 8))
        batch.append(PreparedObservation(ids, decode_jpeg(jpeg(i), CAMERA, 8192)))
    together = bench.runner.run(batch)
    # <bos> touch the | red cube ...: the shared words are reused to the token, the last instruction wholly.
    assert [result.prefix_tokens_reused for result in together] == [0, 3, 1, 8]
    for observation_, result in zip(batch, together, strict=True):
        fresh = ContextRunner(bench.vlm, MANIFEST, prefix_cache_tokens=1, max_image_bytes=8192)  # caches nothing
        alone = fresh.run([observation_])[0]
        assert alone.prefix_tokens_reused == 0
        np.testing.assert_allclose(result.tokens, alone.tokens, atol=1e-5)
    distinct = {result.tokens.tobytes() for result in together}
    assert len(distinct) == 4, "every image and instruction shows in the context"


def test_prefix_is_reused_at_the_next_tick() -> None:
    bench = Bench()
    bench.receive("panda", observation(0))
    assert bench.answers()["panda"].prefix_tokens_reused == 0
    bench.clock.advance_ns(100 * MS)
    bench.receive("panda", observation(1))
    assert bench.answers()["panda"].prefix_tokens_reused == 8


def test_several_robots_in_one_batch_and_newest_only() -> None:
    bench = Bench()
    for robot in ("a", "b", "c"):
        bench.receive(robot, observation(0))
        bench.receive(robot, observation(1))
    answers = bench.answers()
    assert {robot: answer.sequence for robot, answer in answers.items()} == {"a": 1, "b": 1, "c": 1}
    assert (bench.service.statistics.batches, bench.service.statistics.published) == (1, 3)


def test_late_observation_is_not_answered() -> None:
    bench = Bench(deadline_s=0.1)
    bench.receive("panda", observation(0))
    bench.clock.advance_ns(101 * MS)
    assert bench.answers() == {}
    assert "late 1" in bench.service.report()


@pytest.mark.parametrize("cause", REFUSALS)
def test_what_cannot_be_answered_is_refused_by_name(cause: str) -> None:
    bench = Bench()
    bench.receive("bad", observation(0, **REFUSALS[cause]))
    bench.receive("good", observation(0))
    assert set(bench.answers()) == {"good"}, "one robot's fault is not another's"
    assert bench.refused == {cause: 1}
    assert f"{cause}=1" in bench.service.report()


def test_bytes_that_are_no_observation_are_refused_by_name() -> None:
    bench = Bench()
    good = observation(0)
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for payload in (b"", b"\x00\x01", good[:-9], bytes(flipped), np.random.default_rng(0).bytes(500)):
        bench.receive("panda", payload)
    assert bench.answers() == {}
    assert bench.service.statistics.refused.total() == 5
    assert set(bench.refused) <= {"truncated", "malformed", "checksum_mismatch"}


def test_key_without_a_valid_robot_id_is_refused() -> None:
    bench = Bench()
    bench.receive("pan-da", observation(0))
    assert bench.refused == {"bad_robot_id": 1}


def test_robots_beyond_the_limit_are_refused() -> None:
    bench = Bench(max_robots=1)
    bench.receive("a", observation(0))
    bench.receive("b", observation(0))
    assert set(bench.answers()) == {"a"}
    assert bench.refused == {"too_many_robots": 1}


def test_failing_model_is_counted_and_the_service_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(bench.vlm, "readout_context", lambda *_: 1 / 0)
        bench.receive("panda", observation(0))
        assert bench.answers() == {}
    assert bench.refused == {"internal_error": 1}
    bench.clock.advance_ns(100 * MS)
    bench.receive("panda", observation(1))
    assert set(bench.answers()) == {"panda"}


def test_context_that_is_not_finite_is_not_sent() -> None:
    bench = Bench()
    bench.vlm.projector.bias.data[0] = float("inf")
    bench.receive("panda", observation(0))
    assert bench.answers() == {}
    assert bench.refused == {"non_finite_context": 1}


def test_image_that_claims_huge_dimensions_is_refused_before_decoding() -> None:
    data = bytearray(jpeg())
    at = data.index(b"\xff\xc0") + 5  # height and width in the frame header
    data[at : at + 4] = b"\xff\xff\xff\xff"
    with pytest.raises((validation.WrongImageSize, validation.MalformedImage), match="external"):
        decode_jpeg(bytes(data), CAMERA, 8192)
    with pytest.raises(validation.MalformedImage):
        decode_jpeg(jpeg(image_format="PNG"), CAMERA, 8192)
