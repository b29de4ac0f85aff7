"""Alerts, dashboard and documents name metrics that exist, with labels and values that occur on a real page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

promql = pytest.importorskip("promql_parser", reason="pip install 'vla-runtime[dev]'")
pytest.importorskip("prometheus_client", reason="pip install 'vla-runtime[gateway]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
sys.path.insert(0, str(Path(__file__).parent))
from observed_gateway import Observed  # noqa: E402
from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from vla_common.messages import new  # noqa: E402
from vla_edge.io_metrics import EdgeCollector  # noqa: E402

ROOT = Path(__file__).parents[2]
GROUPS = yaml.safe_load((ROOT / "config/prometheus/alerts.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD = json.loads((ROOT / "config/grafana/vla.json").read_text())
OURS = {"job", "instance"}
"""Labels that Prometheus adds."""


class Robot:
    shield = new("ShieldStatus", state=0, reason="", tick=7)
    is_ticking, observations = True, 3

    def rejects(self) -> dict[str, int]:
        return {"joint_states_stale": 2}


@pytest.fixture(scope="module")
def known() -> dict[str, list[dict[str, str]]]:
    """Sample name to the label sets that occur."""
    observed = Observed()
    observed.live_a_little()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EdgeCollector(Robot()))
    result: dict[str, list[dict[str, str]]] = {"up": [{"job": "vla-cloud"}, {"job": "vla-edge"}]}
    for page in (observed.metrics.text(), generate_latest(registry)):
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                result.setdefault(sample.name, []).append(sample.labels)
    for rule in RULES:
        if "record" in rule:
            result[rule["record"]] = [{"job": "vla-cloud"}]
    return result


def selectors(expression: str) -> Iterator[object]:
    def visit(node: object) -> Iterator[object]:
        if isinstance(node, promql.VectorSelector):
            yield node
        for name in ("expr", "lhs", "rhs", "vector_selector", "args", "param"):
            part = getattr(node, name, None)
            for one in part if isinstance(part, list) else [part]:
                if isinstance(one, promql.Expr):
                    yield from visit(one)

    return visit(promql.parse(expression))


def check(expression: str, known: dict[str, list[dict[str, str]]]) -> int:
    """Every selector of an expression finds a sample; how many there are."""
    found = list(selectors(expression))
    for one in found:
        assert one.name in known, f"no metric {one.name}: {expression}"
        for labels in known[one.name]:
            for matcher in one.matchers.matchers:
                if matcher.name not in OURS:
                    assert matcher.name in labels, f"{one.name} has no label {matcher.name}: {expression}"
        assert any(fits(one.matchers.matchers, labels) for labels in known[one.name]), f"{one} finds nothing: {expression}"
    return len(found)


def fits(matchers, labels: dict[str, str]) -> bool:
    def holds(matcher) -> bool:
        kind, have = str(matcher.op).rpartition(".")[2], labels.get(matcher.name, "")
        if kind in ("Equal", "NotEqual"):
            return (have == matcher.value) == (kind == "Equal")
        return (re.fullmatch(matcher.value, have) is not None) == (kind == "Re")

    return all(matcher.name in OURS or holds(matcher) for matcher in matchers)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert", rule.get("record")))
def test_every_rule_names_what_exists(rule, known) -> None:
    assert check(rule["expr"], known) >= 1
    if "alert" in rule:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"] and rule["annotations"]["action"]
        named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        carried = set.union(*(set(labels) for one in selectors(rule["expr"]) for labels in known[one.name]), OURS)
        assert named <= carried, f"the summary names {named - carried}"


def test_rules_have_names_of_their_own_and_nothing_unknown() -> None:
    names = [rule.get("alert") or rule["record"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert set(rule) <= {"alert", "record", "expr", "for", "labels", "annotations"}, rule
        assert re.fullmatch(r"(\d+[smh])?", rule.get("for", ""))


def test_the_check_can_fail(known) -> None:
    for wrong in ("vla_nothing > 1", 'vla_kv_blocks{state="lost"}', 'vla_robots{robot="a"}',
                  'rate(vla_time_to_first_token_seconds_bucket{le="1.1"}[5m])', "min_over_time(vla_kv_block[2m])",
                  "sum by (x) (a / vla_robots)"):  # fmt: skip
        with pytest.raises(AssertionError):
            check(wrong, known)
    with pytest.raises(ValueError):
        promql.parse("sum(rate(vla_requests_total[5m])")


def test_what_the_field_asks_for_is_watched() -> None:
    watched = " ".join(rule["expr"] for rule in RULES if "alert" in rule)
    for name in ("vla_serving", "vla_worker_restarts_total", "vla_kv_blocks", "quarantined", "vla_transfer_failures_total",
                 "vla_robot_context_age_seconds", "vla_robot_context_rate_hz", "NOMINAL", "refused", "up{",
                 "vla:first_token_slow", "vla:token_slow"):  # fmt: skip
        assert name in watched, name


def test_the_dashboard_shows_what_exists(known) -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) >= 20
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job"}
    shown = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".+")
            assert check(expression, known) >= 1
            shown |= {one.name for one in selectors(expression)}
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            carried = set.union(*(set(labels) for one in selectors(expression) for labels in known[one.name]))
            assert named <= carried, target
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len(shown) > 30


def test_the_scrape_example_names_the_jobs_of_the_alerts() -> None:
    example = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text())
    jobs = {one["job_name"] for one in example["scrape_configs"]}
    down = next(rule for rule in RULES if rule.get("alert") == "VlaDown")
    assert jobs == {"vla-cloud", "vla-edge"} and all(job in down["expr"] for job in jobs)
    assert example["rule_files"] == ["alerts.yml"]


def test_the_tables_of_the_document_are_current() -> None:
    found = subprocess.run([sys.executable, ROOT / "tools/metrics_table.py", "--check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
