"""The policy's modules: text, backbone with a reused prefix, action head, kinematics, export."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_common.manifest import load_manifest, write_manifest
from vla_models import export_onnx
from vla_models.flow_head import ContextKv, FlowHead, FlowHeadConfig, polynomial_projection
from vla_models.kinematics import ForwardKinematics
from vla_models.llama import LlamaConfig
from vla_models.model_folder import NotAPolicy, load_head, load_vlm
from vla_models.text import InstructionTooLong, UnknownWord, tokenize
from vla_models.vit import VitConfig
from vla_models.vlm import Vlm, VlmConfig

VOCABULARY = ["<pad>", "<unk>", "<bos>", "<sep>", "touch", "the", "red", "cube"]
CHAIN = {
    "joints": [
        {"pos_m": [0.0, 0.0, 0.3], "quat_wxyz": [1.0, 0.0, 0.0, 0.0], "axis": [0.0, 0.0, 1.0]},
        {
            "pos_m": [0.0, 0.0, 0.2],
            "quat_wxyz": [0.7071067811865476, -0.7071067811865476, 0.0, 0.0],
            "axis": [0.0, 0.0, 1.0],
        },
    ],
    "tcp": {"pos_m": [0.0, -0.5, 0.0], "quat_wxyz": [1.0, 0.0, 0.0, 0.0]},
}


def small_vlm() -> Vlm:
    torch.manual_seed(0)
    vit = VitConfig(24, 6, 16, 2, 2, 32, stem=((2, 8), (3, 16)))
    llama = LlamaConfig(len(VOCABULARY), 16, 2, 2, 1, 32, lm_head=False)
    return Vlm(VlmConfig(vit, llama, num_readout=3, context_dim=8, text_length=6)).eval()


def small_head() -> FlowHead:
    torch.manual_seed(0)
    config = FlowHeadConfig(
        CHAIN,
        action_dim=3,
        horizon=4,
        action_patch=2,
        proprio_dim=4,
        context_tokens=3,
        context_dim=8,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
    )
    head = FlowHead(config)
    for parameter in head.parameters():  # adaLN starts at zero: perturb, so that every path counts
        parameter.data += 0.05 * torch.randn_like(parameter)
    return head.eval()


def test_tokenize_pads_and_refuses() -> None:
    assert tokenize("Touch  the RED cube!", VOCABULARY, 8) == [2, 4, 5, 6, 7, 3, 0, 0]
    with pytest.raises(UnknownWord, match="'mug'.*touch the red cube"):
        tokenize("touch the mug", VOCABULARY, 8)
    with pytest.raises(InstructionTooLong, match="at most 3"):
        tokenize("touch the red cube", VOCABULARY, 5)


def test_reused_prefix_equals_one_shot() -> None:
    vlm = small_vlm()
    ids = torch.tensor([tokenize("touch the red cube", VOCABULARY, 6)] * 2)
    images = torch.randint(0, 256, (2, 24, 24, 3), dtype=torch.uint8)
    with torch.no_grad():
        whole = vlm(ids, images)
        reused = vlm.context(vlm.encode_text(ids), images)
    assert whole.shape == (2, 3, 8)
    torch.testing.assert_close(reused, whole, atol=1e-5, rtol=1e-5)


def test_pixel_shuffle_gathers_neighbours() -> None:
    vlm = small_vlm()
    vlm.connector = torch.nn.Identity()
    patches = torch.arange(16.0).view(1, 16, 1).expand(1, 16, 16)
    tokens = vlm.image_tokens(patches)
    assert tokens[0, 0, ::16].tolist() == [0, 1, 4, 5]
    assert tokens[0, 3, ::16].tolist() == [10, 11, 14, 15]


def test_vlm_config_round_trip() -> None:
    config = small_vlm().config
    assert VlmConfig.from_dict(config.to_dict()) == config
    with pytest.raises(TypeError):
        VlmConfig.from_dict({**config.to_dict(), "surprise": 1})


def test_forward_kinematics_by_hand() -> None:
    fk = ForwardKinematics(CHAIN)
    position, axis = fk(torch.tensor([[0.0, 0.0], [np.pi / 2, 0.0], [0.0, np.pi / 2]], dtype=torch.float32))
    # The second frame's -y is the base's +z at rest; turning joint 2 by 90 degrees lays the tool along the base's +x.
    np.testing.assert_allclose(position.numpy(), [[0, 0, 1.0], [0, 0, 1.0], [0.5, 0, 0.5]], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(axis.numpy(), axis=-1), 1, atol=1e-6)


def test_head_learns_a_constant_chunk() -> None:
    """Flow matching on one repeated target: the integrated chunk ends there, from zero and from random noise."""
    head = small_head().train()
    head.action_std.fill_(0.5)
    context, proprio = torch.randn(1, 3, 8), torch.zeros(1, 4)
    target = torch.linspace(-0.5, 0.5, 12).view(1, 4, 3)
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    age, dt = torch.zeros(64, 1), torch.full((64, 1), 0.5)
    for _ in range(300):
        kv = head.context_kv(context.expand(64, -1, -1), context.expand(64, -1, -1))
        noise, time = torch.randn(64, 4, 3), torch.rand(64)
        loss = head.loss(kv, proprio.expand(64, -1), age, dt, target.expand(64, -1, -1), noise, time).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        kv = head.context_kv(context, context)
        for noise in (torch.zeros(1, 4, 3), torch.randn(1, 4, 3)):
            torch.testing.assert_close(head.denoise(kv, proprio, age[:1], dt[:1], noise), target, atol=0.12, rtol=0)


def test_context_kv_does_not_depend_on_the_state() -> None:
    head = small_head()
    now, previous = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    kv = head.context_kv(now, previous)
    assert isinstance(kv, ContextKv) and kv.k.shape == (2, 2, 2, 3, 8) and kv.keypoint.shape == (2, 6)
    torch.testing.assert_close(kv.keypoint[:, :3], head.target_point(now))
    torch.testing.assert_close(kv.keypoint[:, 3:], head.target_point(previous))


def test_exported_graphs_match_torch(tmp_path) -> None:
    head = small_head()
    export_onnx.export_head(head, tmp_path)
    assert export_onnx.check_export(head, tmp_path, seeds=4) < 1e-5
    for name in (export_onnx.CONTEXT_KV, export_onnx.DENOISE):
        raw = (tmp_path / name).read_bytes()
        assert b".py" not in raw, "the exporter left source paths in the graph"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_command_writes_a_folder_that_verifies(tmp_path, capsys) -> None:
    from vla_cli.export_main import main

    assert main(["--out", str(tmp_path), "--steps", "2"]) == 0
    assert "2 Euler steps" in capsys.readouterr().out
    assert load_manifest(tmp_path).extra["head"]["euler_steps"] == 2
    assert main(["--model", str(tmp_path / "missing"), "--out", str(tmp_path)]) == 2


def test_polynomial_projection_keeps_smooth_chunks_and_averages_noise() -> None:
    projection = polynomial_projection(16, 3).double()
    t = torch.arange(1, 17, dtype=torch.float64) / 16
    smooth = 0.3 * t - 0.2 * t**2 + 0.1 * t**3
    torch.testing.assert_close(projection @ smooth, smooth, atol=1e-5, rtol=0)
    torch.testing.assert_close(projection @ projection, projection, atol=1e-5, rtol=0)
    noise = torch.randn(16, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    roughness = [torch.diff(x, n=2, dim=0).square().mean().sqrt() for x in (noise, projection @ noise)]
    assert roughness[1] < 0.1 * roughness[0]
    assert (polynomial_projection(16, 0) == torch.eye(16)).all()


def test_only_the_arms_joints_are_smoothed() -> None:
    config = dataclasses.replace(small_head().config, smooth_degree=1)
    torch.manual_seed(0)
    plain, smooth = small_head(), FlowHead(config).eval()
    smooth.load_state_dict(plain.state_dict())  # no weight of its own: the same file serves both
    context, state = export_onnx.example_inputs(plain)
    with torch.no_grad():
        kv = plain.context_kv(context["context"], context["context_prev"])
        raw, smoothed = (
            h.denoise(kv, state["proprio"], state["age_s"], state["dt_s"], state["noise"]) for h in (plain, smooth)
        )
    torch.testing.assert_close(smoothed[..., 2], raw[..., 2])
    assert torch.diff(smoothed[0, :, :2], n=2, dim=0).abs().max() < 1e-6


def test_a_verified_folder_of_something_else_is_refused_by_name(tmp_path) -> None:
    manifest = load_manifest(Path(__file__).parents[2] / "models" / "tabletop", verify=False)
    write_manifest(tmp_path, dataclasses.replace(manifest, files={}, extra={}))
    for load in (load_vlm, load_head):
        with pytest.raises(NotAPolicy, match="vla export"):
            load(tmp_path)
