"""The tables of `vla top`, without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

for module in ("httpx", "rich", "prometheus_client"):
    pytest.importorskip(module, reason=f"{module} is not installed: pip install 'vla-runtime[gateway]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
import httpx  # noqa: E402
from observed_gateway import Observed  # noqa: E402
from rich.console import Console  # noqa: E402

from vla_cli import top_main  # noqa: E402
from vla_cli.top_main import NoStatus, ask, main  # noqa: E402
from vla_cli.top_view import view  # noqa: E402
from vla_cloud.gateway import status as gateway_status  # noqa: E402


@pytest.fixture(scope="module")
def status() -> dict:
    observed = Observed()
    observed.live_a_little()
    return json.loads(json.dumps(observed.source.status()))


def drawn(status: dict, gone: str = "", width: int = 160) -> str:
    console = Console(width=width, record=True, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(view(status, "http://x:1", gone))
    return captured.get()


def test_everything_is_there(status) -> None:
    text = drawn(status)
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "serving" in rows["vla"] and "http://x:1" in rows["vla"]
    assert "nominal" in rows["arm1"] and "40 ms" in rows["arm1"] and "following the policy" in rows["arm1"]
    assert "holding" in rows["arm2"] and "idle" not in rows["arm2"]
    assert "waiting" in rows["robots1"] and "2" in rows["robots1"]
    assert all(part in rows["d0"] for part in ("decode", "57 %", "9 (3 failed)", "25 %")) and "small" in text
    assert "80 ms" in rows["first"] and "20 ms" in rows["per"]
    assert "3 served, 1 refused, 1 failed" in text


def test_what_a_robot_says_is_text_and_no_command_to_the_terminal(status) -> None:
    text = drawn(status)
    assert "\x1b" not in text and "[bold]" in text and "<img" in text


def test_a_narrow_terminal_and_a_cloud_without_robots_or_chat(status) -> None:
    assert max(map(len, drawn(status, width=60).splitlines())) <= 60
    assert "robots:" not in drawn({**status, "robots": None})
    alone = drawn({**status, "models": {}})
    assert "arm1" in alone and "workers of" not in alone
    nobody = drawn({**status, "robots": {**status["robots"], "robots": []}})
    assert "robots: 0 of at most 4" in nobody


def test_a_server_that_has_gone_is_told_beside_the_old_state(status) -> None:
    text = drawn(status, gone="nothing answers")
    assert "disconnected: nothing answers" in text and "arm1" in text


def test_no_status_is_an_error_with_a_remedy(status) -> None:
    def client(answer) -> httpx.Client:
        return httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))

    def refused(request):
        raise httpx.ConnectError("Connection refused")

    for answer, told in (
        (refused, "status_listen"), (lambda _: httpx.Response(404), "is it 'vla cloud'"),
        (lambda _: httpx.Response(401), "VLA_API_KEY"), (lambda _: httpx.Response(200, text="<html>"), "no JSON"),
        (lambda _: httpx.Response(200, json={"version": 99}), "this version"),
        (lambda _: httpx.Response(200, json=[]), "this version"),
        (lambda _: httpx.Response(200, content=b" " * (9 << 20)), "more than a state"),
    ):  # fmt: skip
        with client(answer) as one, pytest.raises(NoStatus, match=told):
            ask(one)
    with client(lambda _: httpx.Response(200, json=status)) as one:
        assert ask(one) == status
    assert gateway_status.VERSION == top_main.VERSION


def test_a_key_is_sent(monkeypatch) -> None:
    seen = []

    def fake(client):
        seen.append(client.headers.get("authorization"))
        raise NoStatus("x")

    monkeypatch.setattr(top_main, "ask", fake)
    monkeypatch.setenv("VLA_API_KEY", "k")
    assert main(["--once"]) == 1 and seen == ["Bearer k"]


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--interval", "nan"], ["--json"], ["--url", "http://[::1"]])
def test_a_wrong_command_line_is_refused(arguments, capsys) -> None:
    assert main(arguments) == 2 and "vla top:" in capsys.readouterr().err
