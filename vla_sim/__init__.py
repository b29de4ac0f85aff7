"""Simulated robot: MuJoCo world, tabletop tasks, expert, dataset, closed-loop evaluation."""

import os

# MuJoCo chooses its OpenGL platform when it is first imported, which may be anywhere below this
# package. Off-screen EGL works without a display and without a GPU.
os.environ.setdefault("MUJOCO_GL", "egl")
# Mesa's software renderer: at 96x96 more threads only steal time from the control processes.
os.environ.setdefault("LP_NUM_THREADS", "1")
