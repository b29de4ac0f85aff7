"""Paths for people who look after the server: its state as JSON, and a page that shows it live."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vla_cloud.gateway.status import StatusSource

STATUS_PATH: Final = "/vla/status"
_PAGE: Final = Path(__file__).parent / "web" / "index.html"


def status_routes(source: StatusSource) -> list[Route]:
    """The paths. The page holds no data: what it shows comes from STATUS_PATH."""

    async def status(request: Request) -> Response:
        return Response(msgspec.json.encode(source.status()), 200, {"cache-control": "no-store"}, "application/json")

    return [Route(STATUS_PATH, status), page_route()]


def page_route() -> Route:
    """The page at ``/``. Its headers let it run what it brings itself, and ask this server; nothing else."""
    body = _PAGE.read_bytes()
    headers = {
        "content-security-policy": content_policy(body.decode()), "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer", "cache-control": "no-cache", "x-frame-options": "DENY",
    }  # fmt: skip

    async def page(request: Request) -> Response:
        return Response(body, 200, headers, "text/html")

    return Route("/", page)


def content_policy(html: str) -> str:
    """A content security policy that names the page's own script and style by their hashes."""
    hashes = {
        tag: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
