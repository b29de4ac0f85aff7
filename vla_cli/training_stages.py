"""The stages of `vla train`, one method each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vla_cli.evaluation_policy import InProcessPolicy
from vla_common.clock import Clock
from vla_common.manifest import Camera, write_manifest
from vla_models.flow_head import FlowHead, FlowHeadConfig
from vla_models.llama import LlamaConfig
from vla_models.model_folder import load_head, load_modules, load_vlm, save_modules, write_model_folder
from vla_models.training import head as head_stage
from vla_models.training.data import FrameSet, PhraseTable, load_frames, read_shards
from vla_models.training.loop import LoopConfig, TrainingLoop
from vla_models.training.vision import AuxiliaryHeads, CameraGeometry, VisionObjective
from vla_models.vit import VitConfig
from vla_models.vlm import Vlm, VlmConfig
from vla_sim import dataset, evaluate, head_samples, kinematics, scene, shards, tasks
from vla_sim.config import CONTROL_PERIOD_S, JOINT_NAMES

if TYPE_CHECKING:
    from vla_cli.train_main import TrainConfig

TEXT_LENGTH = 9


def demo_configs() -> tuple[VlmConfig, FlowHeadConfig]:
    """Shapes of the demo policy: 1.6 M parameters in the cloud, 1.4 M on the edge."""
    vit = VitConfig(96, 12, 128, 4, 4, 384, activation="gelu_tanh", stem=((4, 64), (3, 128)))
    llama = LlamaConfig(len(tasks.VOCABULARY), 128, 4, 4, 2, 384, max_position_embeddings=64, lm_head=False)
    return VlmConfig(vit, llama, text_length=TEXT_LENGTH), FlowHeadConfig(chain=demo_chain(), smooth_degree=3)


def demo_chain() -> dict[str, Any]:
    """Kinematic chain of the demo arm: the numbers that ``ForwardKinematics`` needs, from the simulator's file."""
    raw = json.loads(kinematics.CHAIN_FILE.read_text(encoding="utf-8"))
    joints = [{key: joint[key] for key in ("pos_m", "quat_wxyz", "axis")} for joint in raw["joints"]]
    return {"joints": joints, "tcp": {key: raw["tcp"][key] for key in ("pos_m", "quat_wxyz")}}


def phrase_table() -> PhraseTable:
    """Every phrasing of every task and colour as token ids."""
    texts = [
        [[p.format(colour=c, noun=n) for p in tasks.PHRASES[t] for n in tasks.NOUNS] for c in tasks.COLOURS]
        for t in tasks.TASKS
    ]
    return PhraseTable.build(texts, tasks.VOCABULARY, TEXT_LENGTH)


class Training:
    """State shared by the stages: configuration, folders, models."""

    def __init__(self, config: TrainConfig, work: Path, out: Path, clock: Clock, report: Callable[[str], None]) -> None:
        self.config, self.work, self.out, self.clock, self.report = config, work, out, clock, report
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        vlm_config, head_config = demo_configs()
        self.vlm, self.flow_head = Vlm(vlm_config), FlowHead(head_config)
        self._frames: tuple[list[dict[str, np.ndarray]], FrameSet] | None = None

    def data(self) -> None:
        """Expert episodes and grounding scenes, in blocks: an interrupted run goes on with the block it was in."""
        c, folder = self.config.data, self.work / "data"
        folder.mkdir(parents=True, exist_ok=True)
        present = True
        for kind, total, size in (("episodes", c.episodes, 200), ("grounding", c.grounding_frames, 2000)):
            for block, first in enumerate(range(0, total, size)):
                done = folder / f"{kind}_{block}.done"
                if done.exists():
                    continue
                present = False
                self.report(f"data: {kind} {first}..{min(first + size, total)} of {total}")
                # A block has a seed of its own, so its files never mix with another's; a second try replaces them.
                arguments = [f"--{kind}", str(min(size, total - first)), "--seed", str(self.config.seed * 1000 + block)]
                dataset.main(["--out", str(folder), *arguments, "--workers", str(c.workers)])
                done.touch()
        if present:
            self.report(f"data: present in {folder}")

    def frames(self) -> tuple[list[dict[str, np.ndarray]], FrameSet]:
        """Shards and decoded frames, read once."""
        if self._frames is None:
            found = read_shards(self.work / "data")
            self._frames = found, load_frames(found, self.report)
        return self._frames

    def vision(self) -> None:
        """Train the backbone and the keypoint; writes ``work/vision.safetensors``."""
        done = self.work / "vision.safetensors"
        if done.exists():
            return self.report(f"vision: present in {done}")
        c = self.config.vision
        aux = AuxiliaryHeads(
            self.vlm.config.vit.hidden_size, self.vlm.config.context_dim, len(tasks.COLOURS), len(tasks.TASKS)
        )
        view = scene.CAMERAS["front"]
        camera = CameraGeometry(view.pos_m, view.xyaxes, float(np.radians(view.fovy_deg)))
        _, frames = self.frames()
        objective = VisionObjective(
            self.vlm, self.flow_head, aux, frames, phrase_table(), camera, c.batch, seed=self.config.seed
        )
        trained = {"vlm": self.vlm, "keypoint": self.flow_head.keypoint, "aux": aux}
        loop = TrainingLoop(trained, LoopConfig(c.steps, c.learning_rate), self.work / "vision", self.clock)

        def evaluate() -> None:
            with torch.no_grad():
                metrics = objective.compute(frames.test_index[:1024], np.random.default_rng(0))
            self.report("vision test: " + " ".join(f"{k} {float(v):.3f}" for k, v in metrics.items()))

        loop.run(objective.loss, lambda line: self.report(f"vision {line}"))
        loop.use_average()
        evaluate()
        save_modules(done, vlm=self.vlm, keypoint=self.flow_head.keypoint)

    def samples(self) -> tuple[head_stage.HeadSamples, np.ndarray]:
        """Re-labelled head samples of all episode shards, and which of them are for training (bool[N])."""
        folder_shards, frames = self.frames()
        rng, parts, start = np.random.default_rng(self.config.seed), [], 0
        for shard in folder_shards:
            count = len(shard["episode"])
            if len(np.unique(shard["episode"])) < count:  # grounding shards have one-frame episodes: no motion
                parts.append(self._relabel(shard, start, rng))
                self.report(f"head samples: frames {start}..{start + count}")
            start += count
        samples = head_stage.HeadSamples.concatenate(parts)
        return samples, np.isin(samples.frame, frames.train_index)

    def _relabel(self, shard: dict[str, np.ndarray], start: int, rng: np.random.Generator) -> head_stage.HeadSamples:
        s = head_samples.sample_chunks(shard, rng, per_frame=self.config.head.samples_per_frame)
        first, _ = shards.episode_bounds(shard)
        previous, dt_s = head_stage.previous_frames(s["row"], np.arange(len(first)) - first, rng)
        return head_stage.HeadSamples(
            frame=s["row"] + start,
            previous=previous + start,
            target=s["target"],
            task=s["task"],
            proprio=s["proprio"],
            age_s=s["age_s"],
            dt_s=dt_s,
            target_pos=s["target_pos"],
            chunk=s["actions"],
        )

    def head(self) -> None:
        """Train the action head on the frozen backbone; writes ``work/head.safetensors``."""
        done = self.work / "head.safetensors"
        if done.exists():
            return self.report(f"head: present in {done}")
        load_modules(self.work / "vision.safetensors", vlm=self.vlm, keypoint=self.flow_head.keypoint)
        samples, train = self.samples()
        contexts = head_stage.ContextTable(
            self.vlm, self.frames()[1], phrase_table(), samples, self.report, self.config.seed
        )
        head_stage.fit_normalisation(self.flow_head, samples.take(np.flatnonzero(train)))
        c = self.config.head
        objective = head_stage.HeadObjective(
            self.flow_head, samples, contexts, np.flatnonzero(train), c.batch, seed=self.config.seed
        )
        held_out = np.flatnonzero(~train)[:4096]

        def report(line: str) -> None:
            self.report(f"head {line}")
            if loop.step % 1000 == 0:
                self.report(f"head test: {objective.evaluate(held_out)}")

        loop = TrainingLoop(
            {"head": self.flow_head}, LoopConfig(c.steps, c.learning_rate), self.work / "head", self.clock
        )
        loop.run(objective.loss, report)
        loop.use_average()
        self.report(f"head test, averaged weights: {objective.evaluate(held_out)}")
        save_modules(done, head=self.flow_head)

    def export(self) -> None:
        """Write the model folder ``out`` from the trained stages."""
        load_modules(self.work / "vision.safetensors", vlm=self.vlm)
        load_modules(self.work / "head.safetensors", head=self.flow_head)
        joints = list(JOINT_NAMES)
        proprio = [f"command:{name}" for name in joints] + ["measured:gripper"]
        view = scene.CAMERAS["front"]
        manifest = write_model_folder(
            self.out,
            self.out.name,
            self.vlm,
            self.flow_head,
            joint_names=joints,
            proprio_names=proprio,
            cameras=[Camera("front", view.width_px, view.height_px)],
            vocabulary=list(tasks.VOCABULARY),
            period_s=CONTROL_PERIOD_S,
            licence="Apache-2.0",
            training_command="vla train",
            seeds={"train": self.config.seed},
            metrics={},
        )
        self.report(f"export: {self.out} (model hash {manifest.model_hash.hex()[:12]})")

    def evaluate(self) -> None:
        """Closed-loop success in the simulator; the figures go into the manifest."""
        vlm, manifest = load_vlm(self.out)
        head, _ = load_head(self.out)
        policy = InProcessPolicy(vlm, head, tuple(manifest.instruction.vocabulary))
        results = evaluate.run_table(policy, episodes=self.config.evaluate_episodes, report=self.report)
        write_manifest(self.out, dataclasses.replace(manifest, metrics={**manifest.metrics, "closed_loop": results}))
