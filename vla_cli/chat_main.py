"""Talk to a chat server of the OpenAI kind, such as the HTTP door of ``vla cloud``, in the terminal.

Answers appear as they are made. Ctrl-C stops an answer, not the program; what has come of it stays part of the talk.
/reset begins anew, /quit (or Ctrl-D) ends. A server that asks for an API key gets the one in the environment variable
VLA_API_KEY (not an argument: other users of the machine can read those).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import ssl
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from vla_common.tls import TlsError, client_context, client_failure

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_START: Final = "vla cloud --set serving.model=smollm2 --set gateway.http_listen=127.0.0.1:8000"
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 600.0
"""Longest time to the first piece of an answer, and between two: a long prompt on a slow machine takes minutes."""
_MAX_ERROR_BYTES: Final = 65_536

Json = dict[str, Any]


class ChatError(Exception):
    """No answer, or only a part of one; the text is for the user."""


def parser() -> argparse.ArgumentParser:
    """Arguments of ``vla chat``."""
    result = argparse.ArgumentParser(
        prog="vla chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("question", nargs="?", help='one question: print its answer and end; "-" reads it from stdin')
    result.add_argument("--url", default="http://127.0.0.1:8000", help="server (%(default)s)")
    result.add_argument("--model", help="one of those it serves; default: its first")
    result.add_argument("--system", help="instruction that stands before the talk")
    result.add_argument("--max-tokens", type=int, help="longest answer")
    result.add_argument("--temperature", type=float, help="0 is greedy; default: the server's")
    result.add_argument("--seed", type=int, help="same seed, same answer")
    result.add_argument("--ca", type=Path, help="https: CA of the server's certificate; default: the public ones")
    result.add_argument("--cert", type=Path, help="https: client certificate, if the server asks for one")
    result.add_argument("--key", type=Path, help="https: its private key")
    result.add_argument("--stats", action="store_true", help="token counts after each answer")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Ask once, or talk.

    Returns:
        0; 1 if there was no whole answer; 2 for a wrong command line; 130 after Ctrl-C in the answer to one question.
    """
    arguments = parser().parse_args(argv)
    timeout = httpx.Timeout(_PAUSE_S, connect=_CONNECT_S)
    try:
        base = _base(arguments.url)
        client = httpx.Client(base_url=base, timeout=timeout, headers=_key(), trust_env=False,
                              verify=_trust(arguments, base))  # fmt: skip
    except TlsError as error:
        print(f"vla chat: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (httpx.InvalidURL, ValueError) as error:
        print(f"vla chat: {arguments.url!r} is not a URL such as http://127.0.0.1:8000: {error}", file=sys.stderr)
        return EXIT_USAGE
    with client:
        try:
            talk = Talk(client, arguments.model or _first_model(client), _options(arguments), arguments.system)
            if arguments.question is None:
                return _interactive(talk, Terminal(), arguments.stats)
            question = sys.stdin.read() if arguments.question == "-" else arguments.question
            return _once(talk, question, arguments.stats)
        except ChatError as error:
            print(f"vla chat: {error}", file=sys.stderr)
            return EXIT_FAILED
        except KeyboardInterrupt:
            print()
            return EXIT_INTERRUPTED


@dataclass
class Talk:
    """Questions and answers so far."""

    client: httpx.Client
    model: str
    options: Json = field(default_factory=dict)
    system: str | None = None
    messages: list[Json] = field(default_factory=list)
    usage: Json | None = None

    def ask(self, question: str) -> Generator[str, None, None]:
        """The pieces of the answer. Question and answer become part of the talk if any of the answer came.

        Closing the iterator ends the request on the server.

        Raises:
            ChatError: refused, or the answer is not whole.
        """
        asked = {"role": "user", "content": question}
        instruction = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {
            "model": self.model, "messages": [*instruction, *self.messages, asked], "stream": True,
            "stream_options": {"include_usage": True}, **self.options,
        }  # fmt: skip
        pieces: list[str] = []
        self.usage = None
        try:
            with contextlib.closing(self._pieces(body)) as received:
                for piece in received:
                    pieces.append(piece)
                    yield piece
        finally:
            if pieces:
                self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]

    def _pieces(self, body: Json) -> Generator[str, None, None]:
        with _told(self.client), self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ChatError(_refusal(response))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                chunk = _json(data)
                if "error" in chunk:
                    raise ChatError(f"the answer broke off: {_message(chunk) or data}")
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk.get("choices") or ():
                    if text := (choice.get("delta") or {}).get("content"):
                        yield str(text)
            raise ChatError("the connection ended in the middle of the answer")


class Terminal:
    """Colours where there is a terminal that shows them, plain text elsewhere."""

    def __init__(self) -> None:
        """Uses rich if it is installed."""
        self._console: Any = None
        with contextlib.suppress(ModuleNotFoundError):
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)
        with contextlib.suppress(ModuleNotFoundError):
            import readline  # noqa: F401  # makes input() remember and edit lines

    def read(self) -> str:
        """The user's line. EOFError, KeyboardInterrupt."""
        return input("> ")

    def note(self, text: str, style: str = "dim") -> None:
        """A line about the talk, not of it."""
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(text, style=style, markup=False)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Any]:
        """Something moves until the returned object's ``stop()``; nothing does outside a terminal."""
        if self._console is None or not self._console.is_terminal:
            yield None
            return
        with self._console.status("", spinner="dots") as status:
            yield status


def _once(talk: Talk, question: str, stats: bool) -> int:
    if not question.strip():
        print("vla chat: the question is empty", file=sys.stderr)
        return EXIT_USAGE
    is_first = True
    try:
        with contextlib.closing(talk.ask(question)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
                is_first = False
    finally:
        if not is_first:
            print(flush=True)
    if stats:
        print(_stats(talk), file=sys.stderr)
    return EXIT_OK


def _interactive(talk: Talk, terminal: Terminal, stats: bool) -> int:
    terminal.note(f"{talk.model} at {talk.client.base_url}   /reset begins anew, /quit ends, Ctrl-C stops an answer")
    while True:
        try:
            line = terminal.read().strip()
        except EOFError:
            print()
            return EXIT_OK
        except KeyboardInterrupt:
            print()
            terminal.note("/quit or Ctrl-D ends")
            continue
        match line:
            case "":
                continue
            case "/quit" | "/exit":
                return EXIT_OK
            case "/reset":
                talk.messages.clear()
                terminal.note("the talk begins anew")
            case _ if line.startswith("/"):
                terminal.note(f"there is no {line.split()[0]}: /reset or /quit")
            case _:
                _turn(talk, terminal, line, stats)


def _turn(talk: Talk, terminal: Terminal, question: str, stats: bool) -> None:
    try:
        with contextlib.closing(talk.ask(question)) as pieces, terminal.waiting() as status:
            for piece in pieces:
                if status is not None:
                    status.stop()
                print(piece, end="", flush=True)
        print(flush=True)
        if stats:
            terminal.note(_stats(talk))
    except KeyboardInterrupt:
        print(flush=True)
        terminal.note("stopped")
    except ChatError as error:
        print(flush=True)
        terminal.note(str(error), "red")


def _key() -> dict[str, str]:
    key = os.environ.get("VLA_API_KEY", "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def _options(arguments: argparse.Namespace) -> Json:
    names = ("max_tokens", "temperature", "seed")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _base(url: str) -> httpx.URL:
    base = httpx.URL(url if "://" in url else f"http://{url}")
    if base.scheme not in ("http", "https") or not base.host:
        raise ValueError("it needs http or https, and a host")
    # People paste the base address that the API's own clients take.
    return base.copy_with(path=base.path.rstrip("/").removesuffix("/v1") or "/")


def _trust(arguments: argparse.Namespace, base: httpx.URL) -> ssl.SSLContext | bool:
    """Whom to believe; raises TlsError."""
    if not (arguments.ca or arguments.cert or arguments.key):
        return True
    if base.scheme != "https":
        raise TlsError("--ca, --cert and --key are for addresses that begin with https://")
    return client_context(arguments.ca, arguments.cert, arguments.key)


def _first_model(client: httpx.Client) -> str:
    with _told(client):
        response = client.get("/v1/models", timeout=_CONNECT_S * 2)
    if response.status_code != 200:
        raise ChatError(_refusal(response))
    models = _json(response.text).get("data") or [{}]
    if not models[0].get("id"):
        raise ChatError(f"{client.base_url} serves no model")
    return str(models[0]["id"])


@contextlib.contextmanager
def _told(client: httpx.Client) -> Iterator[None]:
    """Errors of the network in words."""
    try:
        yield
    except httpx.HTTPError as error:
        told = client_failure(error, client.base_url.host)
        raise ChatError(f"{client.base_url}: {told}" if told else _network_failure(client, error)) from error


def _network_failure(client: httpx.Client, error: httpx.HTTPError) -> str:
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return f"no server at {client.base_url} ({error}); start one with\n  {_START}"
    if isinstance(error, httpx.TimeoutException):
        return f"{client.base_url} does not answer ({type(error).__name__})"
    is_refused = isinstance(error, httpx.RemoteProtocolError) and client.base_url.scheme == "http"
    return f"the connection to {client.base_url} broke: {error}" + (" (is it https://?)" if is_refused else "")


def _refusal(response: httpx.Response) -> str:
    told = b""
    for part in response.iter_bytes():
        told += part
        if len(told) > _MAX_ERROR_BYTES:
            break
    try:
        message = _message(_json(told.decode(errors="replace")))
    except ChatError:
        message = ""
    retry = response.headers.get("retry-after")
    later = f" (try again in {retry} s)" if retry else ""
    return f"{response.status_code} {message or response.reason_phrase}{later}"


def _message(body: Json) -> str:
    error = body.get("error")
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")


def _json(text: str) -> Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"what the server sends is not JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise ChatError(f"what the server sends is not a JSON object: {text[:80]!r}")
    return value


def _stats(talk: Talk) -> str:
    usage = talk.usage or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    known = "" if cached is None else f" ({cached} cached)"
    prompt, completion = usage.get("prompt_tokens", "?"), usage.get("completion_tokens", "?")
    return f"{prompt} prompt tokens{known}, {completion} of the answer"


if __name__ == "__main__":
    sys.exit(main())
