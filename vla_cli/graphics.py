"""Off-screen rendering: find a back end that works, and install its libraries where that is possible.

Run as ``python -m vla_cli.graphics`` by the set-up; used by ``vla doctor``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from typing import Final

BACKENDS: Final = ("egl", "osmesa")
APT_PACKAGES: Final = ("libegl1", "libegl-mesa0", "libgl1", "libgl1-mesa-dri", "libgles2")
APT_LINE: Final = "apt-get install -y " + " ".join(APT_PACKAGES)

# A real frame in a process of its own: a library that loads may still find no driver, and a bad driver may abort.
_TRIAL: Final = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 16, 16) as renderer:
    renderer.update_scene(data)
    renderer.render()
"""


def renders(backend: str, timeout_s: float = 60.0) -> bool:
    """True if MuJoCo draws a frame with this back end (``egl`` or ``osmesa``)."""
    environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    try:
        trial = subprocess.run([sys.executable, "-c", _TRIAL], env=environment, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return trial.returncode == 0


def working_backend() -> str | None:
    """The first back end that draws, or None."""
    return next((backend for backend in BACKENDS if renders(backend)), None)


def install_libraries() -> bool:
    """Install Mesa's EGL by apt where this process may; returns whether it was tried and succeeded."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-qy", *APT_PACKAGES]):
        if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode != 0:
            return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Report the working back end; with ``--install`` make one work. Exit code 1 if none does."""
    parser = argparse.ArgumentParser(prog="python -m vla_cli.graphics", description=__doc__)
    parser.add_argument("--install", action="store_true", help="install missing libraries by apt when run as root")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("mujoco") is None:
        print("mujoco is not installed: pip install 'vla-runtime[sim]'")
        return 1
    backend = working_backend()
    if backend is None and arguments.install and install_libraries():
        backend = working_backend()
    if backend is None:
        print(f"off-screen rendering does not work; as root: apt-get update && {APT_LINE}")
        return 1
    print(f"off-screen rendering works (MUJOCO_GL={backend})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
