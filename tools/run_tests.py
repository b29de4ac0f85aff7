"""Run the default tests in two parts: most of them two at a time, then those that need the machine to themselves.

    python tools/run_tests.py [path ...]         what "make test" runs; arguments as pytest takes them

Ends with the status of the part that failed; 5 if there is no such test in either.
"""

from __future__ import annotations

import subprocess
import sys

NO_TESTS = 5  # pytest.ExitCode.NO_TESTS_COLLECTED
PARTS = (["-n", "2", "--dist", "worksteal", "-m", "not slow and not alone"], ["-m", "not slow and alone"])


def main(arguments: list[str]) -> int:
    """Both parts run, whatever the first finds."""
    found = [subprocess.call([sys.executable, "-m", "pytest", *part, *arguments]) for part in PARTS]
    failed = [status for status in found if status not in (0, NO_TESTS)]
    return failed[0] if failed else NO_TESTS if set(found) == {NO_TESTS} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
