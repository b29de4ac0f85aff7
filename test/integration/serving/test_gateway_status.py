"""What people and collectors see of a running gateway: the state, the page in a browser, `vla top`, metrics of all doors."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

for module in ("httpx", "uvicorn", "tokenizers", "grpc"):
    pytest.importorskip(module, reason=f"{module} is not installed: pip install 'vla-runtime[chat,gateway]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
import grpc  # noqa: E402
from grpc_rig import ask  # noqa: E402
from http_rig import MODEL, HttpRig, body, http_rig, post  # noqa: E402
from observed_gateway import NAUGHTY, Observed  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from serving_rig import ROOT, chain_specs  # noqa: E402

from vla_cloud.config import CloudConfig, GatewayConfig, ServingConfig  # noqa: E402
from vla_cloud.gateway.doors import Doors  # noqa: E402
from vla_cloud.gateway.http_server import HttpServer  # noqa: E402
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc  # noqa: E402
from vla_cloud.gateway.settings import GatewayError  # noqa: E402
from vla_cloud.gateway.status_server import StatusServer, status_page  # noqa: E402
from vla_cloud.pools.serving_thread import ServingThread  # noqa: E402
from vla_common.clock import SystemClock  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VLA = [sys.executable, "-m", "vla_cli"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with http_rig(tmp_path_factory.mktemp("tokenizer")) as it:
        observed = Observed()
        observed.live_a_little()
        it.server.metrics.robots = observed.robots.status
        answer = it.raw(post(body(), "Connection: close"))
        assert b"200 OK" in answer
        it.until(it.is_idle)
        yield it


def get(address: tuple[str, int], path: str, host: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("GET", path, headers={"host": host})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_the_state_is_plain_json(rig: HttpRig) -> None:
    status, headers, text = get(rig.server.address, "/vla/status")
    assert status == 200 and headers["content-type"] == "application/json" and headers["cache-control"] == "no-store"
    told = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert told["version"] == 1 and told["serving"] is True and told["requests"]["served"] >= 1
    assert {worker["name"] for worker in told["models"][MODEL]["workers"]} == {"p0", "d0"}
    assert told["latencies"]["first_token_s"]["count"] >= 1 and told["latencies"]["tokens_per_s"] > 0
    assert [row["robot"] for row in told["robots"]["robots"]] == ["arm1", "arm2"]
    assert told["robots"]["robots"][1]["shield"]["reason"] == NAUGHTY


def test_the_page_may_only_do_what_it_says(rig: HttpRig) -> None:
    status, headers, text = get(rig.server.address, "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy and "http" not in policy
    assert policy.count("'sha256-") == 2 and headers["x-content-type-options"] == "nosniff"
    page = text.decode()
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page) and "@import" not in page, "nothing comes from elsewhere"
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "onclick="):
        assert word not in page, word


@pytest.mark.parametrize("path", ["/", "/vla/status", "/metrics"])
def test_a_page_of_another_name_is_told_nothing(rig: HttpRig, path: str) -> None:
    """Another site can point its own name at 127.0.0.1."""
    assert get(rig.server.address, path, "evil.example")[0] == 421


def test_vla_top_prints_it_once(rig: HttpRig) -> None:
    done = subprocess.run([*VLA, "top", "--once", "--url", rig.url], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for word in ("serving", "arm1", "nominal", "arm2", "p0", "prefill", "first token"):
        assert word in done.stdout, word
    assert "\x1b" not in done.stdout
    done = subprocess.run([*VLA, "top", "--once", "--json", "--url", rig.url], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["version"] == 1


def test_vla_top_says_when_nothing_is_there() -> None:
    done = subprocess.run([*VLA, "top", "--url", "http://127.0.0.1:1"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "nothing answers at http://127.0.0.1:1" in done.stderr and "status_listen" in done.stderr
    assert "Traceback" not in done.stderr


def browse(url: str, folder: Path, *flags: str) -> str:
    """The page's elements after some seconds of its own time."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", f"--user-data-dir={folder}",
        "--virtual-time-budget=4000", *flags, "--dump-dom", url,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def shown(dom: str, part: str) -> list[list[str]]:
    """Cells of a table, as text."""
    section = dom[dom.index(f'id="{part}"') :]
    rows = re.findall(r"<tr>(.*?)</tr>", section[section.index("<tbody>") : section.index("</tbody>")], re.DOTALL)
    return [[re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)] for row in rows]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to show the page in")
def test_a_browser_shows_robots_workers_and_latencies(rig: HttpRig, tmp_path: Path) -> None:
    dom = browse(f"{rig.url}/", tmp_path)
    assert re.search(r'id="state"[^>]*>serving<', dom) and 'id="gone" class="banner" role="alert" hidden' in dom
    one, two = shown(dom, "robots")
    assert one[0] == "arm1" and "nominal" in one[1] and one[3].endswith("Hz")
    assert two[0] == "arm2" and "holding" in two[1] and "&lt;img" in two[8], "what a robot says is text"
    assert "<img" not in dom and "<title>vla</title>" in dom
    workers = {row[0]: row for row in shown(dom, "pools")}
    assert set(workers) == {"p0", "d0"} and workers["p0"][1] == "prefill" and workers["d0"][2] == "ready"
    times = {row[0]: row for row in shown(dom, "times")}
    assert times["first token"][1].endswith(("ms", "s")) and times["whole answers"][4] == "1"
    assert [row[0] for row in shown(dom, "lanes")] == ["robots0", "robots1"]
    assert dom.count('class="spark"') >= 10 and 'class="area"' in dom, "lines are drawn"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to show the page in")
def test_a_browser_says_that_the_server_is_gone(rig: HttpRig, tmp_path: Path) -> None:
    """A server that gives the page once and then its state no more."""
    page = get(rig.server.address, "/")[2]

    def serve() -> None:
        with listener:
            listener.settimeout(60.0)
            for _ in range(1):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n" + page)

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=serve)
    thread.start()
    dom = browse(f"http://127.0.0.1:{port}/", tmp_path)
    thread.join()
    assert re.search(r'id="state"[^>]*>disconnected<', dom) and "Disconnected: the server does not answer." in dom
    assert '<body class="stale">' in dom


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to show the page in")
def test_a_browser_shows_a_cloud_without_chat(tmp_path: Path) -> None:
    observed = Observed()
    observed.live_a_little()
    config = CloudConfig(status_listen="127.0.0.1:0")
    with status_page(config, SystemClock(), observed.robots.status) as server:
        dom = browse(f"http://{server.url}/", tmp_path)
    assert [row[0] for row in shown(dom, "robots")] == ["arm1", "arm2"]
    assert re.search(r'id="pools" class="card" hidden', dom) and 'class="tiles n3"' in dom


def test_a_cloud_without_chat_has_an_address_for_its_state() -> None:
    observed = Observed()
    observed.live_a_little()
    with status_page(CloudConfig(status_listen="127.0.0.1:0"), SystemClock(), observed.robots.status) as server:
        status, _, text = get(server.address, "/vla/status")
        assert status == 200 and json.loads(text)["models"] == {} and len(json.loads(text)["robots"]["robots"]) == 2
        names = {one.name for one in text_string_to_metric_families(get(server.address, "/metrics")[2].decode())}
        assert "vla_robot_context_age_seconds" in names
        assert get(server.address, "/")[0] == 200
        assert get(server.address, "/v1/chat/completions")[0] == 404
        assert get(server.address, "/metrics", "evil.example")[0] == 421
    with pytest.raises(ConnectionRefusedError):
        get(server.address, "/")


def test_the_states_address_is_for_this_machine_without_leave() -> None:
    with pytest.raises(GatewayError, match="status_listen.*other machines"):
        with status_page(CloudConfig(status_listen="0.0.0.0:0"), SystemClock(), dict):
            pass
    with pytest.raises(GatewayError, match="status_listen"):
        with status_page(CloudConfig(status_listen="nonsense"), SystemClock(), dict):
            pass


def test_all_doors_count_on_one_page(tmp_path: Path) -> None:
    from http_rig import BASE, write_tokenizer

    serving = replace(BASE, colocated=True)
    config = CloudConfig(
        serving=ServingConfig(model="some/where/small"), status_listen="127.0.0.1:0",
        gateway=GatewayConfig(http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", drain_s=0.0, access_log=False),
    )  # fmt: skip
    observed = Observed()
    thread = ServingThread(serving, SystemClock(), chain_specs(serving, None))
    thread.start()
    try:
        doors = Doors(config, write_tokenizer(tmp_path), thread.service, SystemClock(), robots=observed.robots.status)
        thread.call(doors.start())
        try:
            web, state, rpc = doors._doors
            assert isinstance(web, HttpServer) and isinstance(state, StatusServer)
            with grpc.insecure_channel(f"127.0.0.1:{rpc.port}") as channel:
                stub = pb_grpc.ChatStub(channel)
                assert stub.Generate(ask("hi", sampling={"max_tokens": 4, "temperature": 0.0}), timeout=60).done.usage
                assert len(list(stub.GenerateStream(ask("hi", sampling={"max_tokens": 4, "temperature": 0.0}), timeout=60)))
                with pytest.raises(grpc.RpcError):
                    stub.Generate(ask("hi", model="other"), timeout=60)
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary("/vla.v1.Chat/Generate")(b"\xff\xff", timeout=60)
            pages = [get(server.address, "/metrics")[2].decode() for server in (web, state)]
            for page in pages:
                counted = {tuple(sorted(sample.labels.items())): sample.value for one in text_string_to_metric_families(page)
                           for sample in one.samples if sample.name == "vla_requests_total"}  # fmt: skip
                assert counted == {
                    (("code", "OK"), ("door", "grpc"), ("outcome", "served")): 2,
                    (("code", "NOT_FOUND"), ("door", "grpc"), ("outcome", "refused")): 1,
                    (("code", "INVALID_ARGUMENT"), ("door", "grpc"), ("outcome", "refused")): 1,
                }  # fmt: skip
                assert "vla_time_to_first_token_seconds_count 2.0" in page and "vla_robots 0.0" in page
        finally:
            thread.call(doors.stop())
    finally:
        thread.stop()


def test_vla_top_lives_until_ctrl_c(rig: HttpRig) -> None:
    from test_cli_chat import Pty

    with Pty(url=rig.url, program="top") as terminal:
        for _ in range(2):
            terminal.until("arm2")  # drawn, and drawn again
        terminal.type("\x03")
        assert terminal.ended() == 0
