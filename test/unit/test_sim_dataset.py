import numpy as np
import pytest

from vla_sim.config import HOME
from vla_sim.dataset import main, record_episode
from vla_sim.grounding import FIRST_ID, record_grounding
from vla_sim.head_samples import CHUNK_STEPS, MAX_AGE_S, sample_chunks
from vla_sim.images import decode_jpeg
from vla_sim.perturb import Disturber
from vla_sim.shards import ShardWriter, episode_bounds, jpeg_of, load_shard
from vla_sim.tasks import PICK
from vla_sim.world import TabletopWorld


@pytest.fixture(scope="module")
def world():
    made = TabletopWorld()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shard(world, tmp_path_factory):
    writer = ShardWriter(tmp_path_factory.mktemp("shard"), "test")
    for episode in range(3):
        record_episode(world, writer, seed=3, episode=episode)
    for item in range(6):
        record_grounding(world, writer, seed=3, item=item)
    return load_shard(writer.flush())


def test_round_trip(shard):
    count = len(shard["episode"])
    assert len(shard["jpeg_offsets"]) == count + 1 and shard["jpeg_offsets"][-1] == len(shard["jpeg_bytes"])
    assert decode_jpeg(jpeg_of(shard, count - 1)).shape == (96, 96, 3)
    assert shard["q_cmd"].shape == shard["q_meas"].shape == (count, 8)
    assert shard["cube_pos"].shape == shard["cube_vel"].shape == (count, 4, 3)
    assert shard["cube_pos"].dtype == np.float32 and shard["cube_present"].dtype == bool
    assert shard["cube_present"][np.arange(count), shard["target"]].all()
    single = shard["episode"] >= FIRST_ID
    assert single.sum() == 6 and (shard["frame"][single] == 0).all() and not shard["cube_vel"][single].any()


def test_nothing_is_written_without_frames(tmp_path):
    assert ShardWriter(tmp_path, "empty").flush() is None and not list(tmp_path.iterdir())


def test_an_episode_follows_from_its_seed(world, shard, tmp_path):
    writer = ShardWriter(tmp_path, "again")
    record_episode(world, writer, seed=3, episode=1)
    again = load_shard(writer.flush())
    rows = np.flatnonzero(shard["episode"] == 1)
    np.testing.assert_array_equal(again["q_cmd"], shard["q_cmd"][rows])
    np.testing.assert_array_equal(again["cube_pos"], shard["cube_pos"][rows])
    assert jpeg_of(again, 3) == jpeg_of(shard, rows[3])


def test_episode_bounds(shard):
    first, last = episode_bounds(shard)
    assert (shard["episode"][first] == shard["episode"]).all() and (shard["episode"][last] == shard["episode"]).all()
    assert (shard["frame"][first] == 0).all()


def test_head_samples_are_finite_and_consistent(shard):
    samples = sample_chunks(shard, np.random.default_rng(0), per_frame=4)
    count = 4 * len(shard["episode"])
    assert samples["proprio"].shape == (count, 9) and samples["actions"].shape == (count, CHUNK_STEPS, 8)
    assert all(np.isfinite(values).all() for values in samples.values())
    assert (samples["age_s"] >= 0).all() and (samples["age_s"] <= MAX_AGE_S).all()
    row, target = samples["row"], samples["target"]
    assert shard["cube_present"][row, target].all()
    np.testing.assert_array_equal(samples["target_pos"], shard["cube_pos"][row, target])
    # One tick never moves a joint by more than the expert's limits allow.
    assert np.abs(samples["actions"][:, 0, :7]).max() <= 0.0161
    assert np.abs(samples["actions"][:, 0, 7]).max() <= 0.0401
    closure = samples["proprio"][:, 7]
    assert closure.min() >= 0 and closure.max() <= 1


def test_a_held_cube_is_the_target_of_a_pick(shard):
    rows = np.flatnonzero((shard["cube_held"] >= 0) & (shard["episode"] >= FIRST_ID))
    assert len(rows), "choose other seeds: no grounding frame with a cube in the gripper"
    samples = sample_chunks(shard, np.random.default_rng(0), per_frame=20, rows=rows)
    pick = samples["task"] == PICK
    assert (samples["target"][pick] == shard["cube_held"][samples["row"][pick]]).all()


def test_samples_without_noise_and_age_follow_the_recording(world, tmp_path, monkeypatch):
    """On an undisturbed path the label is what was recorded."""
    monkeypatch.setattr("vla_sim.dataset.DISTURBED_SHARE", 0.0)
    monkeypatch.setattr("vla_sim.head_samples.NOISE_SHARES", (1.0, 0.0, 0.0))
    monkeypatch.setattr("vla_sim.head_samples.RANDOM_GRIPPER_SHARE", 0.0)
    monkeypatch.setattr("vla_sim.head_samples.MAX_AGE_S", 0.0)
    writer = ShardWriter(tmp_path, "calm")
    record_episode(world, writer, seed=3, episode=0)
    calm = load_shard(writer.flush())
    rows = np.arange(len(calm["episode"]) - 1)
    samples = sample_chunks(calm, np.random.default_rng(0), per_frame=1, rows=rows)
    np.testing.assert_allclose(samples["proprio"][:, :8], calm["q_cmd"][rows], atol=1e-6)
    own = (samples["target"] == calm["target"][rows]) & (samples["task"] == calm["task"][rows])
    error = np.abs(samples["actions"][:, 9] + samples["proprio"][:, :8] - calm["q_cmd"][rows + 1]).max(axis=1)
    assert own.sum() > 8 and np.median(error[own]) < 2e-3


def test_disturbances_stay_within_their_means():
    rng = np.random.default_rng(0)
    disturber = Disturber(rng, enabled=True)
    q = np.array(HOME)
    disturbed = 0
    for _ in range(1000):
        expert = np.array(HOME)
        q_next = disturber.command(q, expert)
        disturbed += not np.array_equal(q_next, expert)
        q = q_next
        assert np.isfinite(q).all() and 0 <= q[7] <= 1
    assert 100 < disturbed < 600
    assert Disturber(rng, enabled=False).command(q, expert) is expert


def test_command_line(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--episodes", "1", "--grounding", "2", "--seed", "5", "--workers", "1"]) == 0
    assert len(list(tmp_path.glob("shard_*.npz"))) == 2 and not list(tmp_path.glob("*.partial"))
    assert "2 x grounding" in capsys.readouterr().out
