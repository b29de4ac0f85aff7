"""Training pieces: resume after a kill, labels, pairing of frames, phrase table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_common.clock import ManualClock
from vla_models.text import UnknownWord
from vla_models.training.data import PhraseTable
from vla_models.training.head import previous_frames
from vla_models.training.loop import LoopConfig, TrainingLoop, rate_at
from vla_models.training.vision import CameraGeometry, patch_labels


def loop_in(folder, steps: int) -> tuple[torch.nn.Linear, TrainingLoop]:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    config = LoopConfig(steps=steps, learning_rate=1e-2, warmup_steps=2, log_every=5, save_every_s=1e9)
    return module, TrainingLoop({"module": module}, config, folder, ManualClock())


def objective(module: torch.nn.Linear):
    def loss(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 3, generator=generator)
        return {"loss": (module(x) - x[:, :2]).square().mean()}

    return loss


def test_resumed_run_equals_an_uninterrupted_one(tmp_path) -> None:
    module, whole = loop_in(tmp_path / "whole", 20)
    whole.run(objective(module), lambda line: None)
    first_module, first = loop_in(tmp_path / "parts", 20)

    def killed(step: int) -> dict[str, torch.Tensor]:
        if step == 7:
            raise KeyboardInterrupt
        return objective(first_module)(step)

    with pytest.raises(KeyboardInterrupt):
        first.run(killed, lambda line: None)
    first.save()
    second_module, second = loop_in(tmp_path / "parts", 20)
    assert second.step == 7
    second.run(objective(second_module), lambda line: None)
    torch.testing.assert_close(second_module.weight, module.weight)
    torch.testing.assert_close(second.average["module.weight"], whole.average["module.weight"])


def test_progress_averages_over_the_steps_since_the_last_line(tmp_path) -> None:
    module, loop = loop_in(tmp_path, 10)
    lines: list[str] = []
    loop.run(lambda step: {"loss": module.weight.sum() * 0 + 3.0}, lines.append)
    assert len(lines) == 2 and all("loss 3.0000" in line for line in lines)


def test_rate_warms_up_and_decays() -> None:
    config = LoopConfig(steps=100, learning_rate=1.0, warmup_steps=10, final_rate=0.1)
    rates = [rate_at(step, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.1) and all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_camera_projection_agrees_with_the_simulator() -> None:
    mujoco = pytest.importorskip("mujoco")
    from vla_sim import scene

    model = scene.build_model()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    view = scene.CAMERAS["front"]
    camera = CameraGeometry(view.pos_m, view.xyaxes, float(np.radians(view.fovy_deg)))
    identity = model.camera("front").id
    points = np.random.default_rng(0).uniform([0.38, -0.22, 0.0], [0.64, 0.22, 0.2], (20, 3)).astype(np.float32)
    local = (points - data.cam_xpos[identity]) @ data.cam_xmat[identity].reshape(3, 3)
    scale = 0.5 / np.tan(np.radians(view.fovy_deg) / 2)
    expected = np.stack([0.5 - scale * local[:, 0] / local[:, 2], 0.5 + scale * local[:, 1] / local[:, 2]], -1)
    np.testing.assert_allclose(camera.project(points), expected, atol=1e-4)


def test_patch_labels_mark_the_patch_of_each_present_object() -> None:
    pixels = np.array([[[0.125, 0.125], [0.875, 0.625]]], dtype=np.float32)
    labels = patch_labels(pixels, np.array([[True, True]]), side=4, reach=0.6).reshape(4, 4)
    assert labels[0, 0] == 1 and labels[2, 3] == 2 and (labels > 0).sum() == 2
    assert (patch_labels(pixels, np.array([[True, False]]), side=4, reach=0.6) > 0).sum() == 1


def test_previous_frames_stay_inside_the_episode() -> None:
    frame_in_episode = np.concatenate([np.arange(3), np.arange(9)])
    frame = np.repeat(np.arange(12), 200)
    previous, dt_s = previous_frames(frame, frame_in_episode, np.random.default_rng(0))
    back = frame - previous
    assert (back <= frame_in_episode[frame]).all() and (back >= 0).all()
    assert set(np.unique(back)) <= {0, 3, 4, 5, 6, 7}
    moved = back > 0
    np.testing.assert_allclose(dt_s[moved], back[moved] * 0.1, rtol=1e-6)
    assert (dt_s[~moved] == 0.5).all()


def test_phrase_table_repeats_shorter_lists_and_refuses_unknown_words() -> None:
    vocabulary = ["<pad>", "<unk>", "<bos>", "<sep>", "touch", "tap", "red"]
    table = PhraseTable.build([[["touch red", "tap red"]], [["touch red"]]], vocabulary, 5)
    assert table.ids.shape == (2, 1, 2, 5) and table.tasks == 2
    assert (table.ids[1, 0, 0] == table.ids[1, 0, 1]).all()
    with pytest.raises(UnknownWord):
        PhraseTable.build([[["touch blue"]]], vocabulary, 5)
