"""The private folder of a gateway's control socket; that of a gateway which was killed goes at the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_PREFIX: Final = "vla-serving-"
_LOCK: Final = "lock"


class SocketFolder:
    """A folder of mode 0700 in the system's temporary folder, locked as long as this process has it."""

    def __init__(self) -> None:
        """Make it, and remove those of gateways that are no more. Raises OSError."""
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it has its name: a folder with a lock that nobody holds is an abandoned one.
        self._fd = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / ".lock").rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove it. Safe to call twice."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_abandoned() -> None:
    """Remove this user's folders whose gateway is no more; whatever cannot be looked at is left alone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
                continue
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
