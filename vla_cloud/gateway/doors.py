"""All doors of a gateway, in the event loop of the pools: what cloud_main opens and closes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from vla_cloud.config import CloudConfig
from vla_cloud.gateway.answer_text import Tokenizer
from vla_cloud.gateway.chat import Chat, ServedModel, Service
from vla_cloud.gateway.chat_types import SamplingDefaults
from vla_cloud.gateway.clients import open_clients
from vla_cloud.gateway.grammar_checker import GrammarChecker
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import Clock
from vla_common.tracing import Tracer


class Door(Protocol):
    """A server."""

    async def start(self) -> None:
        """Listen, or raise a ValueError that names the remedy."""
        ...

    async def stop(self) -> None:
        """Close. Safe to call twice."""
        ...


class Doors:
    """The chat layer and its servers. Use it in one event loop."""

    def __init__(
        self, config: CloudConfig, tokenizer: Tokenizer, service: Service, clock: Clock, tracer: Tracer | None = None,
        robots: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """Nothing listens yet. ``robots``: their part of the state, see ``vla_cloud.context.robots_status``.

        Raises:
            GatewayError: a package is missing, or an address is refused.
        """
        gateway = config.gateway
        name = gateway.model_name or Path(config.serving.model).name
        clients = open_clients(clock, gateway.api_keys, gateway.salt_secret)
        folder = getattr(tokenizer, "folder", None)
        self._checker = (
            None if folder is None else GrammarChecker(folder, tokenizer.eos_token_ids, gateway.grammar)
        )
        defaults = SamplingDefaults(**getattr(tokenizer, "sampling", {}))
        served = ServedModel(name, tokenizer, service, grammars=self._checker, defaults=defaults)
        self.chat = Chat([served], clock, clients=clients, tracer=tracer)
        self._drain_s = gateway.drain_s
        self._doors: list[Door] = []
        try:
            from vla_cloud.gateway.metrics import GatewayMetrics

            self.metrics = metrics = GatewayMetrics(clock, self.chat.health, access_log=gateway.access_log)
            if robots is not None:
                metrics.robots = robots
            metrics.clients = self.chat.clients.counts
            remote = config.may_be_insecure
            if gateway.http_listen:
                from vla_cloud.gateway.http_server import HttpServer

                self._doors.append(HttpServer(self.chat, gateway, clock, allow_remote=remote, metrics=metrics,
                                              tls=config.tls))  # fmt: skip
            if config.status_listen:
                from vla_cloud.gateway.status import StatusSource
                from vla_cloud.gateway.status_server import StatusServer

                source = StatusSource(metrics, self.chat.health, clock, lambda: self.chat.is_serving)
                self._doors.append(StatusServer(config, clock, metrics, source, self.chat.clients))
            if gateway.grpc_listen or gateway.control_listen:
                # Its library logs a line for each malformed header and failed handshake: strangers could fill the log.
                os.environ.setdefault("GRPC_VERBOSITY", "NONE")
                from vla_cloud.gateway.grpc_server import GrpcServer

                self._doors.append(GrpcServer(self.chat, gateway, clock, allow_remote=remote, metrics=metrics,
                                              tls=config.tls))  # fmt: skip
        except ModuleNotFoundError as error:
            raise GatewayError(f"{error.name} is not installed: pip install 'vla-runtime[gateway]'") from error

    async def start(self) -> None:
        """Open all doors, or none.

        Raises:
            ValueError: one cannot be opened.
        """
        self.chat.clients.start()
        try:
            for door in self._doors:
                await door.start()
        except ValueError:
            await self._close()
            raise

    async def stop(self) -> None:
        """Refuse new requests, let those under way end for ``drain_s``, then close all doors."""
        await self.chat.drain(self._drain_s)
        await self._close()

    async def _close(self) -> None:
        for door in reversed(self._doors):
            await door.stop()
        self.chat.close()
        if self._checker is not None:
            self._checker.close()
