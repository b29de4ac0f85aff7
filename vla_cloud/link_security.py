"""What the cloud's settings mean for its links: Zenoh's settings, and warnings about doors that are open to anyone."""

from __future__ import annotations

import logging
from typing import Any

from vla_cloud.config import CloudConfig
from vla_cloud.gateway.settings import is_reachable
from vla_common.bus_config import BusError, check_endpoint, is_local
from vla_common.certificate_file import validity_problem
from vla_common.clock import SystemClock
from vla_common.link_security import host_settings
from vla_common.tls import secret_problem
from vla_common.zenoh_session import read_access_control

LOG = logging.getLogger(__name__)


def link_settings(config: CloudConfig) -> dict[str, Any]:
    """Zenoh settings of the robots' link.

    Raises:
        BusError: it would be reachable and unencrypted without leave, or a file cannot be used.
    """
    try:
        check_endpoint(config.listen, config.may_be_insecure)
    except BusError as error:
        raise BusError(f"{error} (--insecure-non-loopback)") from error
    settings = host_settings(config.listen, config.tls, config.robot_link)
    if config.robot_link.access is not None:
        settings |= read_access_control(config.robot_link.access)
    return settings


def warn_of_open_doors(config: CloudConfig, has_keys: bool = False) -> None:
    """Log what other machines reach without having to prove who they are, and certificates that end.

    ``has_keys``: chat clients are asked for an API key.
    """
    link, gateway = config.robot_link, config.gateway
    if not is_local(config.listen):
        if not link.authenticates:
            LOG.warning("anyone who reaches %s can act as any robot: set robot_link.client_ca (docs/security.md)",
                        config.listen)  # fmt: skip
        elif link.access is None:
            LOG.warning("a robot on %s can write and read the topics of the others: set robot_link.access "
                        "(docs/security.md)", config.listen)  # fmt: skip
    for name, listen in (("HTTP", gateway.http_listen), ("gRPC", gateway.grpc_listen)):
        if listen and is_reachable(listen) and config.tls.client_ca is None and not has_keys:
            LOG.warning("anyone who reaches %s can chat over %s: set tls.client_ca (docs/security.md) or "
                        "gateway.api_keys (docs/clients.md)", listen, name)  # fmt: skip
    for path in (config.tls.certificate, config.tls.client_ca, link.client_ca):
        problem = "" if path is None else validity_problem(path, SystemClock().wall_ns())
        if problem:
            LOG.warning("%s", problem)
    for path in (config.tls.key, link.users):
        if path is not None and (problem := secret_problem(path)):
            LOG.warning("%s", problem)
