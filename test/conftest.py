"""Which tests share the machine: those that watch real clocks or drive whole robots run alone, one after another.

And what no test leaves to the next: a log that goes to a captured stream which is closed by then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# The same examples in every run, and no time limits on a machine that does other things too;
# --hypothesis-profile=default looks for new examples.
hypothesis.settings.register_profile(
    "seeded", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("seeded")

ALONE = (
    "fault", "ros", "integration/test_cloud_process.py", "integration/test_serving_benchmark.py",
    "integration/test_gateway_benchmark.py", "integration/test_record_command.py",
    "integration/serving/test_serving_robots.py", "integration/serving/test_greedy_equality.py",
)  # fmt: skip
"""Folders and files. ``tools/run_tests.py`` runs all others first, two at a time."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(ALONE):
            item.add_marker(pytest.mark.alone)


@pytest.fixture(autouse=True)
def _log_is_left_as_it_was() -> Iterator[None]:
    """A main function that is called in a test sends the log of the process to that test's standard error."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # pytest's own are of other classes
            root.removeHandler(handler)
    root.setLevel(level)
