"""A resumable training loop: AdamW, warm-up + cosine, clipping, weight average, checkpoints, progress with ETA."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vla_common.clock import Clock


@dataclass(frozen=True)
class LoopConfig:
    """Hyper-parameters of one training stage."""

    steps: int
    learning_rate: float
    warmup_steps: int = 200
    final_rate: float = 0.02  # fraction of learning_rate at the end
    weight_decay: float = 0.02
    clip_norm: float = 1.0
    average_decay: float = 0.998  # exponential moving average of the weights, used for evaluation and export
    log_every: int = 100
    save_every_s: float = 60.0


def rate_at(step: int, config: LoopConfig) -> float:
    """Learning rate at ``step``: linear warm-up, then half a cosine down to ``final_rate``."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    floor = config.final_rate
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class TrainingLoop:
    """Runs ``loss(step) -> {"loss": scalar, other metrics}`` to ``config.steps`` and can be killed at any time.

    ``folder`` receives ``checkpoint.safetensors`` (weights, averages, optimiser moments, step), replaced atomically.
    The same folder resumes where it stopped.
    """

    def __init__(self, modules: Mapping[str, nn.Module], config: LoopConfig, folder: Path, clock: Clock) -> None:
        self.config, self.folder, self.clock = config, folder, clock
        self.parameters: dict[str, nn.Parameter] = {
            f"{name}.{key}": p for name, m in modules.items() for key, p in m.named_parameters() if p.requires_grad
        }
        decay = [p for p in self.parameters.values() if p.ndim >= 2]
        rest = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98))
        self.average = {k: p.detach().clone() for k, p in self.parameters.items()}
        self.step = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def run(self, loss: Callable[[int], Mapping[str, Tensor]], report: Callable[[str], None]) -> None:
        """Train until ``config.steps``; ``report`` gets one line every ``log_every`` steps."""
        start_ns, start_step, saved_ns = self.clock.monotonic_ns(), self.step, self.clock.monotonic_ns()
        sums: dict[str, float] = {}
        counted = 0
        while self.step < self.config.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(self.step, self.config)
            metrics = loss(self.step)
            self.optimizer.zero_grad(set_to_none=True)
            metrics["loss"].backward()
            norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.config.clip_norm)
            if torch.isfinite(norm):
                self.optimizer.step()
                self._update_average()
            self.step += 1
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + float(value.detach())
            counted += 1
            now_ns = self.clock.monotonic_ns()
            if self.step % self.config.log_every == 0:
                eta_s = (now_ns - start_ns) / 1e9 / (self.step - start_step) * (self.config.steps - self.step)
                text = " ".join(f"{k} {v / counted:.4f}" for k, v in sums.items())
                report(f"step {self.step}/{self.config.steps} {text} eta {eta_s / 60:.1f} min")
                sums, counted = {}, 0
            if (now_ns - saved_ns) / 1e9 > self.config.save_every_s:
                self.save()
                saved_ns = now_ns
        self.save()

    def use_average(self) -> None:
        """Replace the live weights by their average (call once, after ``run``)."""
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(self.average[key])

    def _update_average(self) -> None:
        # Young averages forget faster, so that the random start does not linger.
        decay = min(self.config.average_decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - decay)

    def save(self) -> None:
        """Write the checkpoint; a kill in between leaves the previous one."""
        tensors: dict[str, Tensor] = {}
        for key, parameter in self.parameters.items():
            tensors[f"weight/{key}"] = parameter.detach().contiguous()
            tensors[f"average/{key}"] = self.average[key].contiguous()
            state = self.optimizer.state.get(parameter)
            if state:
                tensors[f"m/{key}"], tensors[f"v/{key}"] = state["exp_avg"], state["exp_avg_sq"]
        path = self.folder / "checkpoint.safetensors"
        save_file(tensors, str(path) + ".part", metadata={"step": str(self.step)})
        os.replace(str(path) + ".part", path)

    def _resume(self) -> None:
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return
        from safetensors import safe_open

        with safe_open(str(path), "pt") as opened:
            step = int((opened.metadata() or {})["step"])
        tensors = load_file(str(path))
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(tensors[f"weight/{key}"])
                self.average[key].copy_(tensors[f"average/{key}"])
                if f"m/{key}" in tensors:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(float(step)),
                        "exp_avg": tensors[f"m/{key}"],
                        "exp_avg_sq": tensors[f"v/{key}"],
                    }
        self.step = step
