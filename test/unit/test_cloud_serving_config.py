"""The ``serving`` section of the cloud's configuration, and what workers are told of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_cloud.cloud_main import parser, read_config
from vla_cloud.config import CloudConfig, RetryRules, ServingConfig
from vla_cloud.core.generate import Priority
from vla_cloud.pools.worker_settings import WorkerSettings, worker_specs
from vla_common.config import ConfigError, from_mapping, load_config

FILE = Path(__file__).parents[2] / "config" / "cloud.yaml"


def test_the_file_holds_the_defaults() -> None:
    assert load_config(CloudConfig, FILE) == CloudConfig()


def test_priorities_are_named() -> None:
    config = load_config(CloudConfig, None, ["serving.admission.share={low: 0.25}"])
    assert config.serving.admission.share == {Priority.LOW: 0.25}


@pytest.mark.parametrize(
    "override, text",
    [
        ("serving.modle=x", "did you mean 'model'"),
        ("serving.transfer=shared-memory", "did you mean 'shared_memory'"),
        ("serving.blocks=0", "at least 1"),
        ("serving.deadline_s=0", "positive"),
        ("serving.lease_s=10", "four times"),
        ("serving.supervisor.hang_s=1", "two heartbeats"),
        ("serving.supervisor.backoff_max_s=0.1", "below"),
        ("serving.supervisor.start_s=-1", "positive"),
        ("serving.retry.max_failures=0", "at least 1"),
        ("serving.retry.transfer_margin=0", "positive"),
        ("serving.admission.max_active=0", "at least 1"),
        ("serving.nice=20", "0 to 19"),
        ("context.compute=lane", "did you mean 'lanes'"),
        ("context.image_cache=0", "at least 1"),
        ("context.lanes.count=-1", "0 \\(as many as"),
        ("context.lanes.hedge_s=0", "positive"),
        ("context.lanes.hedge_s=0.2", "below answer_within_s"),
        ("context.lanes.hang_s=0.3", "two heartbeats"),
        ("serving.admission.share={urgent: 0.5}", "none of"),
    ],
)
def test_wrong_values_are_refused_by_name(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(CloudConfig, FILE, [override])


def test_roles() -> None:
    assert ServingConfig(colocated=True, workers=2).roles == {"w0": "both", "w1": "both"}
    split = ServingConfig(prefill_workers=2)
    assert split.roles == {"p0": "prefill", "p1": "prefill", "d0": "decode"}


def test_workers_are_told_what_they_need() -> None:
    config = ServingConfig(model="smollm2", colocated=False, blocks=7, threads=3, retry=RetryRules(transfer_base_s=40.0))
    specs = worker_specs(config)
    assert [(spec.name, spec.role) for spec in specs] == [("p0", "prefill"), ("d0", "decode")]
    command = list(specs[1].command("unix:/x", "d0.4"))
    assert command[1:7] == ["-m", "vla_cloud.pools.worker_main", "--connect", "unix:/x", "--worker", "d0.4"]
    settings = from_mapping(WorkerSettings, json.loads(command[-1]))
    assert (settings.role, settings.model, settings.blocks, settings.threads) == ("decode", "smollm2", 7, 3)
    assert (settings.nice, settings.transfer_base_s) == (10, 40.0)
    assert specs[0].environment["OMP_NUM_THREADS"] == "3"


def test_a_transfer_may_take_base_plus_size() -> None:
    retry = ServingConfig().retry
    assert retry.transfer_s(0) == 2.0
    assert retry.transfer_s(2_000_000_000) == pytest.approx(2.0 + 10.0 * 3.0)


def test_flags_of_the_command_override_the_file() -> None:
    words = ["--config", str(FILE), "--chat", "smollm2", "--colocated", "--http", "127.0.0.1:8000", "--threads", "2"]
    config = read_config(parser().parse_args(words))
    assert (config.serving.model, config.serving.colocated, config.threads) == ("smollm2", True, 2)
    assert (config.gateway.http_listen, config.gateway.grpc_listen) == ("127.0.0.1:8000", "")
    with pytest.raises(ConfigError, match=r"serving\.model"):
        read_config(parser().parse_args(["--grpc", "127.0.0.1:50051"]))
