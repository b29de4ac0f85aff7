"""benchmarks/router.py: its traces and its simulated workers, on small inputs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from router_parts import latency, trace  # noqa: E402
from router_parts.cluster import Cache, Cluster, Rules  # noqa: E402

from vla_cloud.core.kv_events import KvChange  # noqa: E402
from vla_cloud.core.router.settings import PlacementConfig  # noqa: E402

SPEC = importlib.util.spec_from_file_location("router_benchmark", ROOT / "benchmarks" / "router.py")
router = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(router)

SMALL = Rules(prefills=4, decodes=4, cache_blocks=2000)


def requests(count: int = 120) -> list[trace.Request]:
    return trace.synthetic(count, seed=3)


def test_no_router_beats_one_endless_cache_and_ours_comes_nearer_than_the_others() -> None:
    given = requests()
    most = trace.most_reuse(given)
    runs = {name: Cluster(SMALL, config).run(given) for name, config in router.configs().items()}
    ours, least, robin = runs["ours (cost)"], runs["least load"], runs["round robin"]
    assert most >= ours["reuse_blocks"] > max(least["reuse_blocks"], robin["reuse_blocks"]) + 0.1
    assert all(run["requests"] == 120 and run["prefill_max_to_mean"] >= 1 for run in runs.values())


def test_one_worker_with_room_for_all_reuses_all_that_can_be() -> None:
    given = requests()
    # So far apart that each prompt is computed before the next one comes.
    calm = [trace.Request(60.0 * i, one.input_tokens, one.output_tokens, one.blocks) for i, one in enumerate(given)]
    alone = Cluster(Rules(prefills=1, decodes=1, cache_blocks=10**6), PlacementConfig()).run(calm)
    assert alone["reuse_blocks"] == pytest.approx(trace.most_reuse(given))
    assert alone["queue_p99_s"] == 0 and alone["sent_blocks"] == pytest.approx(1 - trace.most_reuse(given))


def test_all_load_is_back_and_the_index_is_what_the_caches_hold() -> None:
    cluster = Cluster(Rules(prefills=3, decodes=2, cache_blocks=150), PlacementConfig(imbalance_tokens=1 << 40))
    found = cluster.run(requests())
    placement = cluster.placement
    assert not placement._placed and all(placement.load_tokens(name) == 0 for name in placement._workers)
    for name, worker in {**cluster.prefills, **cluster.decodes}.items():
        assert placement.index.blocks(name) == len(worker.cache.held) <= 150
    assert found["router"]["event_gaps"] == found["router"]["blocks_refused"] == 0 < found["router"]["blocks_removed"]


def test_a_run_is_repeated_exactly() -> None:
    config = PlacementConfig(temperature_tokens=500.0)
    assert Cluster(SMALL, config).run(requests(60)) == Cluster(SMALL, config).run(requests(60))


def test_a_cache_gives_up_leaves_first_and_tells_all() -> None:
    cache = Cache(4)
    a, b = [trace.block_hash(i) for i in range(3)], [trace.block_hash(i) for i in (0, 11, 12)]
    cache.store(a)
    cache.store(b)
    assert (cache.match(a), cache.match(b)) == (2, 3)
    cache.store([trace.block_hash(i) for i in (20, 21, 22)])
    assert (cache.match(a), cache.match(b)) == (1, 1)
    held: set[bytes] = set()
    for number, event in enumerate(cache.take_events()):
        assert event.sequence == number
        (held.add if event.change is KvChange.STORED else held.remove)(event.block_hash)
        assert len(held) <= 4
    assert held == set(cache.held)
    cache.store([trace.block_hash(i) for i in range(30, 40)])
    assert len(cache.held) == 4


def test_a_trace_is_read_and_what_is_none_is_refused_with_the_place_to_get_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}\n')
    assert trace.read(path) == [trace.Request(1.5, 600, 7, (0, 5))]
    for wrong in ("{}", "text", '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0]}'):
        path.write_text(wrong + "\n")
        with pytest.raises(ValueError, match="trace.jsonl:1 .*kvcache-ai/Mooncake"):
            trace.read(path)


def test_reuse_counts_beginnings_only() -> None:
    given = [trace.Request(0, 1024, 1, blocks) for blocks in ((1, 2), (1, 3), (4, 2), (1, 2))]
    assert trace.most_reuse(given) == 3 / 8


def test_prompts_have_the_lengths_of_the_trace_and_one_beginning() -> None:
    assert set(latency.lengths(50, 1, [30, 40])) == {30, 40} and min(latency.lengths(50, 1)) >= 16
    short, long = latency.prompts([20, 3000], 1)
    assert (len(short), len(long)) == (80, 12000) and long.startswith(short)


def test_a_quick_run_gives_tables_and_json_and_says_that_its_trace_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "router.json"
    assert router.main(["--quick", "--json", str(path)]) == 0
    told = capsys.readouterr()
    assert "synthetic" in told.out and "kvcache-ai/Mooncake" in told.err and "| ours (cost) |" in told.out
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    row = found["latency"]
    assert row["nodes"] == 20_000 and row["events_per_s"] > 0 and 64 < row["bytes_per_node"] < 1000
    assert 0 < row["place_p50_cpu_us"] <= row["place_p99_cpu_us"]
    runs = found["replay"]["runs"]
    assert set(runs) == {"ours (cost)", "least load", "round robin"}
    assert found["replay"]["most_reuse"] >= runs["ours (cost)"]["reuse_blocks"]
    assert router.main(["--trace", str(tmp_path / "none.jsonl"), "--skip", "latency"]) == 1
