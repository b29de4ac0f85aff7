"""Configuration of the cloud process; ``config/cloud.yaml`` explains each value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ContextConfig:
    """Robot requests: stages 3, 4 and 7."""

    rate_hz: float = 10.0
    deadline_s: float = 0.1
    max_batch: int = 8
    max_robots: int = 64
    forget_after_s: float = 60.0
    receive_queue: int = 128
    prefix_cache_tokens: int = 4096
    max_image_bytes: int = 262_144
    wire_dtype: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        """Refuse values that would serve nobody."""
        for name in ("rate_hz", "deadline_s", "forget_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_batch", "max_robots", "receive_queue", "prefix_cache_tokens", "max_image_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class CloudConfig:
    """The whole process."""

    listen: str = "tcp/127.0.0.1:7448"
    allow_non_loopback: bool = False
    domain: int = 0
    model: Path = Path("models/tabletop")
    threads: int = 1
    log_period_s: float = 5.0
    context: ContextConfig = field(default_factory=ContextConfig)

    def __post_init__(self) -> None:
        """Refuse values that would serve nobody."""
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if not self.log_period_s > 0:
            raise ValueError(f"log_period_s must be positive, got {self.log_period_s}")
