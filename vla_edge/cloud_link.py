"""The link to the cloud, with its encryption and log-in, as every process of the edge opens it."""

from __future__ import annotations

import logging
from typing import Any

from vla_common.bus_config import BusError, check_endpoint
from vla_common.certificate_file import validity_problem
from vla_common.clock import Clock, SystemClock
from vla_common.link_diagnosis import link_problem
from vla_common.link_security import join_settings
from vla_common.link_watch import LinkWatch
from vla_common.tls import secret_problem
from vla_common.zenoh_session import Bus, open_bus
from vla_edge.config import EdgeConfig

LOG = logging.getLogger(__name__)


def check_cloud_link(config: EdgeConfig) -> None:
    """Refuse a link that cannot be opened, or leaves this machine without leave; warn of keys that soon are none.

    Raises:
        BusError: with the remedy.
    """
    _settings(config)
    link = config.cloud_link
    problems = [] if link.certificate is None else [validity_problem(link.certificate, SystemClock().wall_ns())]
    problems += [secret_problem(path) for path in (link.key, link.password_file) if path is not None]
    for problem in filter(None, problems):
        LOG.warning("%s", problem)


def open_cloud_link(config: EdgeConfig, node: str, clock: Clock | None = None, watch: bool = False) -> Bus:
    """Join the cloud link, now or whenever the cloud is there.

    Args:
        config: the edge's. node: name shown to ROS tools, without the robot id. clock: for instants.
        watch: say in the log why there is no connection. One process of a robot does.

    Raises:
        BusError: see :func:`check_cloud_link`.
    """
    link, endpoint = config.cloud_link, config.cloud
    clock = clock or SystemClock()
    bus = open_bus(endpoint, node=f"{node}_{config.robot_id}", allow_remote=config.allow_remote, clock=clock,
                   settings=_settings(config))
    if watch:
        LinkWatch(bus, lambda: link_problem(endpoint, link), clock).start()
    return bus


def _settings(config: EdgeConfig) -> dict[str, Any]:
    check_endpoint(config.cloud, config.allow_remote)
    try:
        return join_settings(config.cloud, config.cloud_link)
    except BusError as error:
        raise BusError(f"{error} (docs/security.md)") from error
