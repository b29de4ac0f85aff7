"""Configuration of the cloud process; ``config/cloud.yaml`` explains each value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vla_cloud.core.admission import AdmissionConfig
from vla_cloud.core.router.settings import PlacementConfig
from vla_cloud.gateway.image_settings import ImageRules
from vla_cloud.gateway.settings import GrammarRules, GrpcRules, check_listen
from vla_common.link_security import RobotLink
from vla_common.tls import ServerTls
from vla_common.tracing import TracingConfig


@dataclass(frozen=True)
class LaneConfig:
    """Robot lanes: processes that compute contexts, beside the chat workers."""

    count: int = 0
    hedge_s: float = 0.06
    answer_within_s: float = 0.2
    heartbeat_s: float = 0.25
    hang_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse values that would never answer."""
        if self.count < 0:
            raise ValueError(f"count must be 0 (as many as workers that prefill, at least 2) or more, got {self.count}")
        for name in ("hedge_s", "answer_within_s", "heartbeat_s", "hang_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.hedge_s >= self.answer_within_s:
            raise ValueError(f"hedge_s {self.hedge_s} must be below answer_within_s {self.answer_within_s}")
        if self.hang_s < 2 * self.heartbeat_s:
            raise ValueError(f"hang_s must be at least two heartbeats of {self.heartbeat_s} s, got {self.hang_s}")


@dataclass(frozen=True)
class ContextConfig:
    """Robot requests: stages 3, 4 and 7."""

    compute: Literal["auto", "in_process", "lanes"] = "auto"
    rate_hz: float = 10.0
    deadline_s: float = 0.1
    max_batch: int = 8
    max_robots: int = 64
    forget_after_s: float = 60.0
    receive_queue: int = 128
    prefix_cache_tokens: int = 4096
    image_cache: int = 64
    max_image_bytes: int = 262_144
    wire_dtype: Literal["float32", "float16"] = "float32"
    lanes: LaneConfig = field(default_factory=LaneConfig)

    def __post_init__(self) -> None:
        """Refuse values that would serve nobody."""
        for name in ("rate_hz", "deadline_s", "forget_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_batch", "max_robots", "receive_queue", "prefix_cache_tokens", "image_cache",
                     "max_image_bytes"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class WorkerRules:
    """How worker processes are watched; seconds."""

    heartbeat_s: float = 1.0
    hang_s: float = 30.0
    start_s: float = 180.0
    stop_s: float = 3.0
    backoff_min_s: float = 0.5
    backoff_max_s: float = 30.0
    backoff_reset_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse rules that kill healthy workers or never notice dead ones."""
        for name in ("heartbeat_s", "hang_s", "start_s", "stop_s", "backoff_min_s", "backoff_max_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.hang_s < 2 * self.heartbeat_s:
            raise ValueError(f"hang_s must be at least two heartbeats of {self.heartbeat_s} s, got {self.hang_s}")
        if self.backoff_max_s < self.backoff_min_s:
            raise ValueError(f"backoff_max_s {self.backoff_max_s} is below backoff_min_s {self.backoff_min_s}")


@dataclass(frozen=True)
class RetryRules:
    """How a chat request is tried again; see ``vla_cloud.core.request_life.LifeConfig``."""

    max_failures: int = 5
    capacity_wait_s: float = 10.0
    transfer_base_s: float = 2.0
    transfer_bytes_per_s: float = 2e8
    transfer_margin: float = 3.0

    def __post_init__(self) -> None:
        """Refuse values that never try or never end."""
        if self.max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, got {self.max_failures}")
        for name in ("capacity_wait_s", "transfer_base_s", "transfer_bytes_per_s", "transfer_margin"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def transfer_s(self, num_bytes: int) -> float:
        """Longest time a transfer of so many bytes may take: base + bytes / bandwidth * margin."""
        return self.transfer_base_s + num_bytes / self.transfer_bytes_per_s * self.transfer_margin


@dataclass(frozen=True)
class ServingConfig:
    """Chat: stages 2 to 6. No model: no chat."""

    model: str = ""
    context_tokens: int | None = None
    colocated: bool = False
    workers: int = 1
    prefill_workers: int = 1
    decode_workers: int = 1
    transfer: Literal["shared_memory", "tcp", "nixl"] = "shared_memory"
    blocks: int = 2048
    chunk_tokens: int = 512
    max_running: int = 32
    max_waiting: int = 256
    host_swap_blocks: int = 0
    threads: int = 1
    nice: int = 10
    lease_s: float = 30.0
    lease_extend_s: float = 5.0
    deadline_s: float = 120.0
    max_deadline_s: float = 3600.0
    max_unread_tokens: int = 16384
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    retry: RetryRules = field(default_factory=RetryRules)
    supervisor: WorkerRules = field(default_factory=WorkerRules)

    def __post_init__(self) -> None:
        """Refuse values that would serve nobody."""
        for name in ("workers", "prefill_workers", "decode_workers", "blocks", "chunk_tokens", "max_running",
                     "max_waiting", "threads", "max_unread_tokens"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.host_swap_blocks < 0:
            raise ValueError(f"host_swap_blocks cannot be negative, got {self.host_swap_blocks}; 0 never swaps")
        for name in ("lease_s", "lease_extend_s", "deadline_s", "max_deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice must be 0 to 19, got {self.nice}")
        if self.lease_s < 4 * self.lease_extend_s:
            raise ValueError(f"lease_s must be at least four times lease_extend_s, got {self.lease_s}")

    @property
    def roles(self) -> dict[str, str]:
        """Name and role of each worker."""
        if self.colocated:
            return {f"w{i}": "both" for i in range(self.workers)}
        prefills = {f"p{i}": "prefill" for i in range(self.prefill_workers)}
        return prefills | {f"d{i}": "decode" for i in range(self.decode_workers)}


@dataclass(frozen=True)
class GatewayConfig:
    """Stage 2: the doors for chat clients. An empty address: no such door."""

    http_listen: str = ""
    http_max_connections: int = 512
    http_max_body_bytes: int = 4_194_304
    http_head_timeout_s: float = 10.0
    http_body_timeout_s: float = 20.0
    http_stall_timeout_s: float = 30.0
    grpc_listen: str = ""
    control_listen: str = ""
    grpc: GrpcRules = field(default_factory=GrpcRules)
    model_name: str = ""
    api_keys: str = ""
    salt_secret: str = ""
    images: ImageRules = field(default_factory=ImageRules)
    drain_s: float = 5.0
    grammar: GrammarRules = field(default_factory=GrammarRules)
    access_log: bool = True

    def __post_init__(self) -> None:
        """Refuse values that would serve nobody."""
        for name in ("http_max_connections", "http_max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("http_head_timeout_s", "http_body_timeout_s", "http_stall_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.drain_s >= 0:
            raise ValueError(f"drain_s cannot be negative, got {self.drain_s}")
        if self.salt_secret and not self.api_keys:
            raise ValueError("salt_secret separates the tenants of api_keys: set both, or neither")
        if self.control_listen:
            check_listen(self.control_listen, False, "gateway.control_listen")

    @property
    def is_open(self) -> bool:
        """Whether there is any door."""
        return bool(self.http_listen or self.grpc_listen or self.control_listen)


@dataclass(frozen=True)
class CloudConfig:
    """The whole process."""

    listen: str = "tcp/127.0.0.1:7448"
    insecure_non_loopback: bool = False
    allow_non_loopback: bool = False  # its old name, still taken
    tls: ServerTls = field(default_factory=ServerTls)
    robot_link: RobotLink = field(default_factory=RobotLink)
    domain: int = 0
    model: Path = Path("models/tabletop")
    threads: int = 1
    log_period_s: float = 5.0
    status_listen: str = ""
    context: ContextConfig = field(default_factory=ContextConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        """Refuse values that would serve nobody."""
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if not self.log_period_s > 0:
            raise ValueError(f"log_period_s must be positive, got {self.log_period_s}")
        if self.gateway.is_open and not self.serving.model:
            raise ValueError("a door of the gateway is to be opened, but no chat model is served: set serving.model")
        batch, image = self.context.max_batch, self.context.max_image_bytes
        # Limits of control messages (vla_cloud.pools.messages), a quarter of which is left to the rest.
        if self.num_lanes and (batch > 64 or image > 1 << 20 or batch * image > 12 << 20):
            told = "max_batch may be 64, max_image_bytes 1 MiB and their product 12 MiB at most"
            raise ValueError(f"with robot lanes, {told}, got {batch} and {image}")

    @property
    def may_be_insecure(self) -> bool:
        """Whether other machines may reach what is not encrypted."""
        return self.insecure_non_loopback or self.allow_non_loopback

    @property
    def num_lanes(self) -> int:
        """Robot lanes to run; 0: contexts are computed in the gateway's process."""
        compute = self.context.compute
        if compute == "in_process" or (compute == "auto" and not self.serving.model):
            return 0
        prefill = sum(role != "decode" for role in self.serving.roles.values()) if self.serving.model else 0
        return self.context.lanes.count or max(2, prefill)

    @property
    def lane_rules(self) -> WorkerRules:
        """How robot lanes are watched: as chat workers are, but they are missed sooner."""
        lanes = self.context.lanes
        return replace(self.serving.supervisor, heartbeat_s=lanes.heartbeat_s, hang_s=lanes.hang_s)
