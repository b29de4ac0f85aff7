"""Which tests share the machine: those that start whole services or watch real clocks run alone, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

ALONE = ("fault", "integration", "ros")
"""Folders. ``tools/run_tests.py`` runs all others first, two at a time."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in ALONE:
            item.add_marker(pytest.mark.alone)
