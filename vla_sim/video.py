"""``video.mp4``: the run drawn again from the recorded simulator states, with an overlay.

Drawn after the run, so that rendering never disturbs it. Needs MuJoCo's off-screen rendering and the ffmpeg that
imageio-ffmpeg ships.

    python -m vla_sim.video runs/<stamp>
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import imageio_ffmpeg
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from vla_common.process import end_with_parent
from vla_common.wire import stamp_ns
from vla_sim.recording import Recording, RecordingError
from vla_sim.report_data import STATE_NAMES
from vla_sim.report_plots import STATE_COLOURS
from vla_sim.tasks import TaskSpec
from vla_sim.world import TabletopWorld

LOG = logging.getLogger(__name__)

Frame = npt.NDArray[np.uint8]

FPS: Final = 25
CAMERA: Final = "overview"
LEAD_NS: Final = 1_500_000_000
_NS_PER_FRAME: Final = 1_000_000_000 // FPS
_WHITE, _SOFT, _PANEL = (255, 255, 255), (206, 214, 222), (18, 26, 34, 190)
_PHASE_COLOURS: Final = {"success": "#2a9d8f", "failure": "#c1121f", "running": "#2b6cb0", "homing": "#52606d",
                         "done": "#52606d"}


@dataclass
class Track:
    """Messages of one topic by stamp."""

    stamps: list[int] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)

    def at(self, at_ns: int) -> Any:
        """Newest message not after ``at_ns``, or None."""
        index = bisect_right(self.stamps, at_ns) - 1
        return self.messages[index] if index >= 0 else None


def read_tracks(folder: Path, max_s: float) -> tuple[int, dict[str, Track]]:
    """When the video begins (shortly before the first episode), and what it shows.

    Args:
        folder: of the run.
        max_s: nothing later than this after the beginning is read.
    """
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    tracks = {name: Track() for name in ("sim_state", "task_status", "shield_status", "policy_status")}
    recording = Recording(folder / "recording.mcap", run["robot"], run["camera"])
    start_ns: int | None = None
    for recorded in recording.messages(list(tracks)):
        at_ns = stamp_ns(recorded.message.header)
        if start_ns is None and recorded.name == "task_status" and recorded.message.phase == "running":
            start_ns = at_ns - LEAD_NS
        if start_ns is not None and at_ns > start_ns + (max_s + 1.0) * 1e9:
            break
        tracks[recorded.name].stamps.append(at_ns)
        tracks[recorded.name].messages.append(recorded.message)
    states = tracks["sim_state"].stamps
    first_ns = states[0] if states else 0
    return (first_ns if start_ns is None else max(start_ns, first_ns)), tracks


class Replay:
    """Draws recorded states of the simulator."""

    def __init__(self) -> None:
        """The scene is built when the first state names it."""
        self._world = TabletopWorld()
        self._scene = ""

    def draw(self, state: Any) -> Frame:
        """uint8 [H, W, 3] of one ``SimState``.

        Raises:
            RecordingError: the state is of another release of the simulator.
        """
        if state.scene != self._scene:
            scene = json.loads(state.scene)
            self._world.reset(scene["seed"], TaskSpec(scene["task"], scene["target"], scene["moving"]))
            self._scene = state.scene
        if len(state.qpos) != len(self._world.qpos()):
            raise RecordingError(f"states of {len(state.qpos)} positions, this release's simulator has "
                                 f"{len(self._world.qpos())}: draw the video with the release that made the recording")
        self._world.show(np.asarray(state.qpos))
        return self._world.render(CAMERA)

    def close(self) -> None:
        """Free the renderer."""
        self._world.close()


def overlay(frame: Frame, time_s: float, task: Any, shield: Any, policy: Any) -> Frame:
    """Frame with instruction, time, shield state, context age and result."""
    image = Image.fromarray(frame)
    draw = ImageDraw.Draw(image, "RGBA")
    large, small = ImageFont.load_default(17), ImageFont.load_default(13)
    width, height = image.size
    draw.rectangle((0, 0, width, 46), fill=_PANEL)
    draw.rectangle((0, height - 26, width, height), fill=_PANEL)
    if task is not None:
        draw.text((12, 4), f"\u201c{task.instruction}\u201d", font=large, fill=_WHITE)
        draw.text((12, 27), f"episode {task.episode + 1} of {task.episodes_total}   "
                            f"{task.successes} ok, {task.failures} failed", font=small, fill=_SOFT)
        _badge(draw, width - 12, 6, task.phase, _PHASE_COLOURS.get(task.phase, "#52606d"), large)
    draw.text((12, height - 21), f"t = {time_s:5.1f} s", font=small, fill=_SOFT)
    # While the robot goes home it plans for itself and hears no contexts.
    if policy is not None and policy.context_age_s >= 0 and (task is None or task.phase == "running"):
        draw.text((120, height - 21), f"context age {1e3 * policy.context_age_s:4.0f} ms", font=small, fill=_SOFT)
    if shield is not None:
        _badge(draw, width - 12, height - 24, STATE_NAMES[shield.state], STATE_COLOURS[shield.state], small)
    return np.asarray(image)


def _badge(draw: ImageDraw.ImageDraw, right: float, top: float, text: str, colour: str, font: Any) -> None:
    left, _, end, bottom = draw.textbbox((0, 0), text, font=font)
    x = right - (end - left) - 14
    draw.rounded_rectangle((x, top, right, top + bottom + 7), 6, fill=colour)
    draw.text((x + 7, top + 2), text, font=font, fill=_WHITE)


def frames(start_ns: int, tracks: dict[str, Track], max_s: float, draw: Callable[[Any], Frame]) -> Iterator[Frame]:
    """Frames at 25 Hz of the robot's clock from ``start_ns`` on, each the newest state at its instant."""
    states = tracks["sim_state"]
    if not states.stamps:
        return
    count = min(round(max_s * FPS), (states.stamps[-1] - start_ns) // _NS_PER_FRAME + 1)
    for index in range(count):
        at_ns = start_ns + index * _NS_PER_FRAME
        yield overlay(draw(states.at(at_ns)), index / FPS, *(tracks[name].at(at_ns) for name in (
            "task_status", "shield_status", "policy_status")))


def write_video(folder: Path, max_s: float = 60.0, progress: Callable[[int], None] = lambda count: None) -> Path | None:
    """Write ``video.mp4`` into a run's folder; None when there is nothing to draw.

    Args:
        folder: of the run.
        max_s: longest video, seconds from the beginning.
        progress: told the number of frames drawn so far.
    """
    start_ns, tracks = read_tracks(folder, max_s)
    replay, path, writer = Replay(), folder / "video.mp4", None
    try:
        for count, frame in enumerate(frames(start_ns, tracks, max_s, replay.draw), 1):
            if writer is None:
                writer = imageio_ffmpeg.write_frames(str(path), (frame.shape[1], frame.shape[0]), fps=FPS,
                                                     codec="libx264", quality=7, ffmpeg_log_level="error",
                                                     output_params=["-threads", "1", "-movflags", "+faststart"])
                writer.send(None)
            writer.send(np.ascontiguousarray(frame))
            progress(count)
    finally:
        if writer is not None:
            writer.close()
        replay.close()
    return path if writer is not None else None


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the video of a folder; returns the exit code."""
    end_with_parent()
    parser = argparse.ArgumentParser(prog="python -m vla_sim.video", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-s", type=float, default=60.0, help="longest video, seconds (default 60)")
    arguments = parser.parse_args(argv)
    try:
        path = write_video(arguments.folder, arguments.max_s)
    except (RecordingError, FileNotFoundError) as error:
        print(f"video: {error}", file=sys.stderr)
        return 2
    print(f"video: {path}" if path else "video: the recording holds no simulator states")
    return 0


if __name__ == "__main__":
    sys.exit(main())
