"""The curl commands of README and docs/chat.md, run as they are written, against real workers; only the port differs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
sys.path.insert(0, str(Path(__file__).parent))
import http_rig

ROOT = Path(__file__).parents[3]
COMMANDS = sorted({
    line.strip()
    for name in ("README.md", "docs/chat.md")
    for line in (ROOT / name).read_text().splitlines()
    if line.strip().startswith("curl ")
})
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[http_rig.HttpRig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_rig, "MODEL", "smollm2")  # as the commands call it
        with http_rig.http_rig(tmp_path_factory.mktemp("model")) as made:
            yield made


def test_there_are_commands() -> None:
    assert sum("/v1/chat/completions" in command for command in COMMANDS) >= 2
    assert {"/health", "/metrics"} <= {"/" + command.rsplit("/", 1)[1] for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_gets_its_answer(rig: http_rig.HttpRig, command: str) -> None:
    host, port = rig.server.address
    here = command.replace("127.0.0.1:8000", f"{host}:{port}")
    assert here != command
    found = subprocess.run(["bash", "-c", here + r" -w '\n%{http_code}'"], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    answer, _, status = found.stdout.rpartition("\n")
    assert status == "200", answer
    if "/metrics" in command:
        assert "# TYPE vla_requests_total counter" in answer
    elif '"stream": true' in command:
        events = [event.removeprefix("data: ") for event in answer.strip().split("\n\n")]
        assert events[-1] == "[DONE]" and json.loads(events[-2])["usage"]["completion_tokens"] > 0
    elif "/v1/chat" in command:
        assert json.loads(answer)["choices"][0]["finish_reason"] in ("stop", "length")
    else:
        assert json.loads(answer)["status"] == "serving"
