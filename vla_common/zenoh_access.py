"""Access control on the cloud link, as Zenoh's ``access_control``: each robot its own topics, nothing else.

A robot is who has its certificate (common name) or its log-in (user name), whichever the cloud asks for. The keys are
those of :mod:`vla_common.topics`, in any ROS domain, with any type hash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from vla_common.topics import ANY_ROBOT, topic_spec

_WRITES: Final = ("observation", "shield_report")
_READS: Final = ("observation", "context")
"""Its own observations too, for a recorder on the robot."""
_TOKEN: Final = "@ros2_lv/*/*/*/*"
"""Domain, session, node and entity number; then kind, enclave, namespace, node name."""
_HEARS: Final = "the cloud hears robots"

Rule = dict[str, Any]


def access_control(robots: Iterable[str]) -> dict[str, Any]:
    """Value of ``access_control`` for a router: what is not permitted here is refused.

    Args:
        robots: their ids.

    Raises:
        ValueError: an id that topics would not take.
    """
    names = sorted(set(robots))
    if ANY_ROBOT in names:
        raise ValueError(f"{ANY_ROBOT!r} is not the id of a robot: it would match all of them")
    # Without it, the robots' sessions would not learn that somebody listens, and would send nothing.
    hears = _rule(_HEARS, ["egress"], ["declare_subscriber"], [_key(name, ANY_ROBOT) for name in _WRITES])
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": [hears, *(rule for name in names for rule in _rules(name))],
        "subjects": [
            subject
            for name in names
            for subject in (
                {"id": f"{name} by certificate", "cert_common_names": [name]},
                {"id": f"{name} by log-in", "usernames": [name]},
            )
        ],
        "policies": [
            {
                "id": name,
                "subjects": [f"{name} by certificate", f"{name} by log-in"],
                "rules": [_HEARS, *(rule["id"] for rule in _rules(name))],
            }
            for name in names
        ],
    }


def access_file(robots: Iterable[str], remarks: Sequence[str]) -> str:
    """Text of a Zenoh configuration file with these rules alone; ``remarks`` are comment lines at its head."""
    head = "".join(f"// {line}\n" for line in remarks)
    return head + json.dumps({"access_control": access_control(robots)}, indent=2) + "\n"


def _rules(robot: str) -> list[Rule]:
    writes, reads = [_key(name, robot) for name in _WRITES], [_key(name, robot) for name in _READS]
    return [
        _rule(f"{robot} writes", ["ingress"], ["put"], writes),
        _rule(f"{robot} subscribes", ["ingress"], ["declare_subscriber"], reads),
        _rule(f"{robot} reads", ["egress"], ["put"], reads),
        _rule(f"{robot} is seen", ["ingress"], ["liveliness_token"], _tokens(robot)),
    ]


def _rule(name: str, flows: list[str], messages: list[str], keys: list[str]) -> Rule:
    return {"id": name, "permission": "allow", "flows": flows, "messages": messages, "key_exprs": keys}


def _key(topic: str, robot: str) -> str:
    return f"*{topic_spec(topic).topic(robot)}/**"


def _tokens(robot: str) -> list[str]:
    """Presence tokens of nodes named after the robot, and of publishers and subscriptions of its topics."""
    mangled = [topic_spec(topic).topic(robot).replace("/", "%") for topic in (*_READS, "shield_report")]
    return [f"{_TOKEN}/NN/*/*/vla_$*_{robot}", *(f"{_TOKEN}/*/*/*/*/{topic}/**" for topic in mangled)]
