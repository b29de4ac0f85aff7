"""Flow-matching action head: context tokens + joint state → a chunk of actions in a few Euler steps (stage 9).

A small diffusion transformer. Action tokens (``action_patch`` consecutive steps each) and two state tokens attend to
each other and, by cross-attention, to the context. Keys and values of the context do not depend on flow time or joint
state, so they are computed once per context and reused by every denoising run on it. Flow time enters through adaLN
only, and the state as tokens: unrolled, the adaLN parts fold to constants in the exported graph.

The state tokens see the *keypoint residual*: the target point read from the context minus the tool point by forward
kinematics of the commanded joints. Joint velocities are left out on purpose: with them a policy copies its own motion.

Flow matching: x_t = (1 - t) e + t a, the network learns a - e (Lipman et al. 2023, "Flow Matching for Generative
Modeling"; rectified-flow form); inference integrates from t = 0 with equal Euler steps.

A *prefix* of actions that are already committed is honoured while integrating, as in real-time chunking (Black et al.
2025, "Real-Time Execution of Action Chunking Flow Policies", arXiv 2506.07339): the clean chunk predicted at time t,
x1 = x_t + (1 - t) v, is pulled towards the prefix Y by v + W (Y - x1) / (1 - t). That is the paper's guidance with the
identity in place of the network's Jacobian and the factor that meets Y exactly where W is 1; it needs no backward pass.
Frozen rows then follow the path (1 - t) e + t Y that training showed, and the free rows join them through attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import attention
from .kinematics import ForwardKinematics


def polynomial_projection(horizon: int, degree: int) -> Tensor:
    """f32[H, H]: least-squares projection of a chunk of deltas onto polynomials of time that are zero at step 0.

    Independent errors of neighbouring steps are small as positions and large as accelerations (0.3 mrad between two
    steps of 10 ms are 3 rad/s²); a polynomial through all steps averages them. Degree 0 leaves the chunk as it is.
    """
    if degree == 0:
        return torch.eye(horizon)
    t = torch.arange(1, horizon + 1, dtype=torch.float64)[:, None] / horizon
    basis = t ** torch.arange(1, degree + 1, dtype=torch.float64)
    return (basis @ torch.linalg.pinv(basis)).float()


PREFIX_SMOOTHNESS = 1e3
"""Weight of squared third differences against squared distances, in steps of the chunk; see ``smoothing_table``."""


def smoothing_table(horizon: int, degree: int) -> Tensor:
    """f32[H + 1, H, H]: how a chunk of deltas is smoothed when its first m rows are frozen, for m = 0 .. H.

    m = 0: ``polynomial_projection``. Otherwise a polynomial through zero would leave the frozen rows with a step; the
    free rows y are those that minimise ``sum (y - d)² + PREFIX_SMOOTHNESS sum (third differences of y)²`` where the
    third differences also run over the frozen rows and the commanded pose before them (Whittaker 1923, "On a new method
    of graduation"; Eilers 2003, "A perfect smoother"). So position, speed and acceleration go on from the frozen rows.
    Degree 0 smooths nothing.
    """
    if degree == 0:
        return torch.eye(horizon).expand(horizon + 1, -1, -1).clone()
    rows = torch.eye(horizon + 1, dtype=torch.float64)  # row 0 is the commanded pose: delta zero, frozen
    differences = torch.diff(rows, n=3, dim=0) if horizon > 2 else rows[:0]
    penalty = PREFIX_SMOOTHNESS * differences.T @ differences
    table = [polynomial_projection(horizon, degree)]
    for frozen in range(1, horizon + 1):
        operator, free = torch.eye(horizon, dtype=torch.float64), slice(frozen + 1, None)
        size = horizon - frozen
        right = torch.cat([-penalty[free, 1 : frozen + 1], torch.eye(size, dtype=torch.float64)], dim=1)
        operator[frozen:] = torch.linalg.solve(torch.eye(size, dtype=torch.float64) + penalty[free, free], right)
        table.append(operator.float())
    return torch.stack(table)


@dataclass(frozen=True)
class FlowHeadConfig:
    """Shapes of the head. ``chain`` is the arm's kinematic chain (see ``ForwardKinematics``).

    ``smooth_degree``: see ``polynomial_projection``; for the arm's joints, after denoising, not in training.
    """

    chain: Mapping[str, Any]
    action_dim: int = 8
    horizon: int = 16
    action_patch: int = 4
    proprio_dim: int = 9
    context_tokens: int = 16
    context_dim: int = 128
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int = 384
    euler_steps: int = 4
    smooth_degree: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, kept in the manifest."""
        return asdict(self)


class ContextKv(NamedTuple):
    """What one context contributes: k, v f[L, B, h, K, d_h]; keypoint f[B, 6] m (target now | at the previous one)."""

    k: Tensor
    v: Tensor
    keypoint: Tensor


class _Block(nn.Module):
    def __init__(self, d: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_self = nn.LayerNorm(d, elementwise_affine=False)
        self.norm_cross = nn.LayerNorm(d)
        self.norm_mlp = nn.LayerNorm(d, elementwise_affine=False)
        self.qkv = nn.Linear(d, 3 * d)
        self.out_self = nn.Linear(d, d)
        self.q_cross = nn.Linear(d, d)
        self.out_cross = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, intermediate), nn.GELU(approximate="tanh"), nn.Linear(intermediate, d))
        self.modulation = nn.Linear(d, 6 * d)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def _split(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        return x.view(b, n, self.heads, d // self.heads).transpose(1, 2)

    @staticmethod
    def _merge(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return x.transpose(1, 2).reshape(b, n, h * d)

    def forward(self, x: Tensor, time: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """x [B, N, d], time [B or 1, d], k and v [B, h, K, d_h] → [B, N, d]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, dim=-1)
        q, k_self, v_self = self.qkv(self.norm_self(x) * (1 + scale1) + shift1).chunk(3, dim=-1)
        attended = attention(self._split(q), self._split(k_self), self._split(v_self))
        x = x + (1 + gate1) * self.out_self(self._merge(attended))
        q = self._split(self.q_cross(self.norm_cross(x)))
        x = x + self.out_cross(self._merge(attention(q, k, v)))
        return x + (1 + gate2) * self.mlp(self.norm_mlp(x) * (1 + scale2) + shift2)


class FlowHead(nn.Module):
    """The action head with its two halves: ``context_kv`` (once per context) and ``denoise`` (every replan)."""

    def __init__(self, config: FlowHeadConfig) -> None:
        super().__init__()
        c = self.config = config
        d, patches = c.hidden_size, c.horizon // c.action_patch
        if c.horizon % c.action_patch:
            raise ValueError(f"horizon {c.horizon} is not a multiple of action_patch {c.action_patch}")
        self.kinematics = ForwardKinematics(c.chain)
        self.context_norm = nn.LayerNorm(c.context_dim)
        self.kv = nn.Linear(c.context_dim, 2 * d * c.num_layers)
        self.keypoint = nn.Sequential(
            nn.LayerNorm(c.context_dim), nn.Linear(c.context_dim, d), nn.GELU(approximate="tanh"), nn.Linear(d, 3)
        )
        self.state = nn.Sequential(
            nn.Linear(c.proprio_dim + 26, 2 * d), nn.GELU(approximate="tanh"), nn.Linear(2 * d, 2 * d)
        )
        self.action_in = nn.Linear(c.action_patch * c.action_dim, d)
        self.position = nn.Parameter(torch.randn(patches, d) * 0.02)
        self.time = nn.Sequential(nn.Linear(64, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU())
        self.blocks = nn.ModuleList(_Block(d, c.num_heads, c.intermediate_size) for _ in range(c.num_layers))
        self.norm_out = nn.LayerNorm(d)
        self.action_out = nn.Linear(d, c.action_patch * c.action_dim)
        self.register_buffer("action_std", torch.ones(c.horizon, c.action_dim))
        self.register_buffer("smoothing", smoothing_table(c.horizon, c.smooth_degree), persistent=False)
        self.register_buffer("earlier", torch.ones(c.horizon, c.horizon).tril(), persistent=False)
        self.register_buffer("proprio_mean", torch.zeros(c.proprio_dim))
        self.register_buffer("proprio_std", torch.ones(c.proprio_dim))
        self.register_buffer("keypoint_mean", torch.tensor([0.5, 0.0, 0.05]))
        self.register_buffer("frequency", torch.exp(torch.linspace(0.0, math.log(200.0), 32)))

    def target_point(self, context: Tensor) -> Tensor:
        """Context [B, K, D] → position of the named object f32[B, 3] m at the instant of the observation."""
        return self.keypoint(context.mean(dim=1)).float() * 0.1 + self.keypoint_mean

    def context_kv(self, context: Tensor, context_prev: Tensor) -> ContextKv:
        """Both f32[B, K, D] → keys, values and keypoints; nothing here depends on joint state or flow time."""
        c = self.config
        b, n, _ = context.shape
        kv = self.kv(self.context_norm(context)).view(b, n, c.num_layers, 2, c.num_heads, -1)
        k, v = kv.permute(3, 2, 0, 4, 1, 5).unbind(0)
        return ContextKv(k, v, torch.cat([self.target_point(context), self.target_point(context_prev)], dim=-1))

    def state_tokens(self, proprio: Tensor, keypoint: Tensor, age_s: Tensor, dt_s: Tensor) -> Tensor:
        """proprio f32[B, 9], keypoint f32[B, 6] m, age_s and dt_s f32[B, 1] → two tokens [B, 2, d]."""
        joints = self.kinematics.num_joints
        tool, axis = self.kinematics(proprio[:, :joints])
        now, previous = keypoint[:, :3], keypoint[:, 3:]
        velocity = (now - previous) / dt_s
        residual = now - tool
        ahead = residual + velocity * age_s
        features = torch.cat(
            [
                (proprio - self.proprio_mean) / self.proprio_std,
                residual / 0.1,
                torch.tanh(residual / 0.02),
                ahead / 0.1,
                torch.tanh(ahead / 0.02),
                torch.tanh(ahead / 0.005),
                velocity / 0.1,
                (tool - self.keypoint_mean) / 0.1,
                axis,
                age_s,
                dt_s - 0.5,
            ],
            dim=-1,
        )
        return self.state(features).view(proprio.shape[0], 2, -1)

    def velocity(self, x: Tensor, time: Tensor, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Flow velocity at x f32[B, H, A] (normalised actions), time f32[B or 1] in [0, 1] → f32[B, H, A]."""
        c = self.config
        angle = time[:, None] * self.frequency
        embedded = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1).to(self.position.dtype))
        b = x.shape[0]
        tokens = self.action_in(x.reshape(b, -1, c.action_patch * c.action_dim)) + self.position
        tokens = torch.cat([state, tokens], dim=1)
        for i, block in enumerate(self.blocks):
            tokens = block(tokens, embedded, k[i], v[i])
        return self.action_out(self.norm_out(tokens[:, 2:])).reshape(b, c.horizon, c.action_dim).float()

    def denoise(
        self,
        kv: ContextKv,
        proprio: Tensor,
        age_s: Tensor,
        dt_s: Tensor,
        noise: Tensor,
        steps: int | None = None,
        prefix: Tensor | None = None,
        prefix_weight: Tensor | None = None,
    ) -> Tensor:
        """Euler integration from ``noise`` f32[B, H, A] → action deltas f32[B, H, A] in rad (gripper: closure).

        ``prefix`` f32[B, H, A] in the same units, with ``prefix_weight`` f32[B, H, 1] in 0 .. 1, not rising with the
        row: 1 freezes a row, which then comes out exactly as it is in the prefix; 0 leaves it free, whatever the prefix
        says there. All weights zero are the same as no prefix.
        """
        steps = steps or self.config.euler_steps
        state = self.state_tokens(proprio, kv.keypoint, age_s, dt_s)
        weight, wanted = prefix_weight, None
        if prefix is not None and weight is not None:
            prefix = torch.where(weight > 0, prefix, torch.zeros_like(prefix))
            wanted = prefix / self.action_std
        x = noise
        for i in range(steps):
            rest = 1 - i / steps
            time = torch.full((1,), i / steps, dtype=x.dtype, device=x.device)
            velocity = self.velocity(x, time, state, kv.k, kv.v)
            if wanted is not None and weight is not None:
                velocity = velocity + weight * (wanted - (x + rest * velocity)) / rest
            x = x + velocity / steps
        deltas = x * self.action_std
        if prefix is None or weight is None:
            return self._smooth(deltas, self.smoothing[0])
        is_frozen = (weight >= 1).to(x.dtype)
        deltas = self._smooth(deltas, self._smoothing_of(is_frozen))
        return torch.where(weight >= 1, prefix, deltas)

    def _smoothing_of(self, is_frozen: Tensor) -> Tensor:
        """``is_frozen`` f32[B, H, 1] of 0 and 1 → the operator f32[B, H, H] for as many rows as are frozen at first."""
        leading = torch.relu(1 - self.earlier @ (1 - is_frozen))[..., 0]
        one, zero = torch.ones_like(leading[:, :1]), torch.zeros_like(leading[:, :1])
        # 1 at the number of leading frozen rows: a matrix product with the table then picks it, without an index.
        chosen = torch.cat([one, leading], dim=1) - torch.cat([leading, zero], dim=1)
        return (chosen @ self.smoothing.flatten(1)).view(-1, *self.smoothing.shape[1:])

    def _smooth(self, deltas: Tensor, operator: Tensor) -> Tensor:
        if self.config.smooth_degree == 0:
            return deltas
        joints = self.kinematics.num_joints
        return torch.cat([operator @ deltas[..., :joints], deltas[..., joints:]], dim=-1)

    def loss(
        self, kv: ContextKv, proprio: Tensor, age_s: Tensor, dt_s: Tensor, chunk: Tensor, noise: Tensor, time: Tensor
    ) -> Tensor:
        """Flow-matching loss per sample f32[B]; ``chunk`` f32[B, H, A] deltas, ``noise`` like it, ``time`` f32[B]."""
        target = chunk / self.action_std
        t = time[:, None, None]
        x = (1 - t) * noise + t * target
        state = self.state_tokens(proprio, kv.keypoint, age_s, dt_s)
        return (self.velocity(x, time, state, kv.k, kv.v) - (target - noise)).square().mean(dim=(1, 2))
