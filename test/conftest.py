"""Which tests share the machine: those that watch real clocks or drive whole robots run alone, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

ALONE = (
    "fault", "ros", "integration/test_cloud_process.py", "integration/test_serving_benchmark.py",
    "integration/test_gateway_benchmark.py", "integration/test_record_command.py",
    "integration/serving/test_serving_robots.py",
)  # fmt: skip
"""Folders and files. ``tools/run_tests.py`` runs all others first, two at a time."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(ALONE):
            item.add_marker(pytest.mark.alone)
