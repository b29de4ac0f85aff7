"""`vla chat` as a user has it: through a pipe, and in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

for module in ("httpx", "uvicorn", "tokenizers"):
    pytest.importorskip(module, reason=f"{module} is not installed: pip install 'vla-runtime[chat,gateway]'")
from http_rig import NEVER, HttpRig, http_rig  # noqa: E402
from serving_rig import ROOT  # noqa: E402

VLA_CHAT = [sys.executable, "-m", "vla_cli", "chat"]
QUESTION = "What is a robot?"


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    slow = {"CHAIN_STEP_S": "0.01", "CHAIN_MAX_MODEL_LEN": "4096"}
    with http_rig(tmp_path_factory.mktemp("tokenizer"), slow, blocks=512, eos=NEVER) as it:
        yield it
        it.until(it.is_idle)


def run(*arguments: str, url: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [*VLA_CHAT, "--url", url, "--temperature", "0", *arguments]
    return subprocess.run(command, input=given, cwd=ROOT, capture_output=True, text=True, timeout=120)


class Pty:
    """The program in a terminal of its own."""

    def __init__(self, *arguments: str, url: str, program: str = "chat") -> None:
        options = ["--temperature", "0"] if program == "chat" else []
        self.fd, inner = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*VLA_CHAT[:-1], program, "--url", url, *options, *arguments], cwd=ROOT, env=environment,
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True, preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(inner)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, mark: str, timeout_s: float = 60.0) -> str:
        """What has appeared since the last mark, up to this one; escape sequences left out."""
        end = time.monotonic() + timeout_s
        while mark not in self.seen:
            assert time.monotonic() < end, f"no {mark!r} in {self.seen!r}, process state {self.state()}"
            if select.select([self.fd], [], [], 0.1)[0]:
                part = os.read(self.fd, 65536).decode(errors="replace")
                self.seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.seen + part).replace("\r", "")
        before, _, self.seen = self.seen.partition(mark)
        return before

    def until_it_sleeps(self) -> None:
        """It has shown its prompt and waits for a key.

        A SIGINT between the two is kept by Python's readline until the next key (seen in 4 of 350,000 attempts): it
        looks for signals only when one interrupts its wait.
        """
        end = time.monotonic() + 60.0
        while self.state() != "S":
            assert time.monotonic() < end, f"process state {self.state()}"
            time.sleep(0.001)

    def state(self) -> str:
        """As in proc(5): S is asleep until something comes."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def ended(self) -> int:
        """Its exit status, when it has ended by itself."""
        return self.process.wait(timeout=60.0)

    def __enter__(self) -> Pty:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C becomes a signal
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests themselves run in a shell's background


def test_one_question_through_a_pipe(rig: HttpRig) -> None:
    result = run("--max-tokens", "12", "--stats", QUESTION, url=rig.url)
    assert (result.returncode, result.stdout) == (0, rig.expected(QUESTION, 12) + "\n"), result.stderr
    assert re.fullmatch(r"\d+ prompt tokens \(\d+ cached\), 12 of the answer\n", result.stderr)
    piped = run("--max-tokens", "12", "-", url=f"{rig.url}/v1/", given=QUESTION)
    assert piped.stdout == result.stdout and piped.stderr == ""


def test_a_talk_in_a_terminal_has_a_memory_and_ctrl_c_stops_only_the_answer(rig: HttpRig) -> None:
    with Pty("--stats", "--max-tokens", "4000", url=rig.url) as terminal:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until(" w")  # a word of the answer
        rig.until(lambda: rig.active == 1)
        terminal.type("\x03")
        terminal.until("stopped")
        rig.until(rig.is_idle)  # the server was told
        terminal.until("> ")
        terminal.type("/reset\n")
        terminal.until("begins anew")
        terminal.type("/what\n")
        terminal.until("there is no /what")
        terminal.until("> ")
        terminal.until_it_sleeps()
        terminal.type("\x03")
        terminal.until("/quit")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.ended() == 0


def test_the_second_question_comes_with_the_first(rig: HttpRig) -> None:
    counts = []
    with Pty("--stats", "--max-tokens", "5", url=rig.url) as terminal:
        for line in ("hello\n", "hello\n", "/reset\n", "hello\n"):
            terminal.until("> ")
            terminal.type(line)
            if line.startswith("/"):
                continue
            counts.append(int(re.search(r"(\d+) prompt tokens", terminal.until("of the answer")).group(1)))
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.ended() == 0
    assert counts[1] > counts[0] + 5 and counts[2] == counts[0]


def test_a_server_that_is_not_there_names_the_command_that_starts_it() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        result = run("hello", url=f"127.0.0.1:{taken.getsockname()[1]}")
    assert result.returncode == 1 and "no server at" in result.stderr
    assert "vla cloud --set serving.model=smollm2 --set gateway.http_listen=127.0.0.1:8000" in result.stderr


def test_refusals_are_told_in_the_servers_words(rig: HttpRig) -> None:
    result = run("--model", "gpt", "hello", url=rig.url)
    assert result.returncode == 1 and "404 no model 'gpt' is served" in result.stderr and result.stdout == ""
    assert run("  ", url=rig.url).returncode == 2
    assert run("x", url="ftp://127.0.0.1").returncode == 2
