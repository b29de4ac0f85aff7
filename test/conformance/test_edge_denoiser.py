"""What every denoiser engine must do alike, on the shipped model. The reference is the torch module in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from imitated_tensorrt import ImitatedCuda, imitated_tensorrt

from vla_common.clock import SystemClock
from vla_common.manifest import load_manifest
from vla_edge.adapters.tensorrt_cache import EngineCache
from vla_edge.core.denoiser import DenoiserError, Prefix
from vla_edge.core.denoiser_io import DenoiserShapes
from vla_edge.engines import measure_latency, missing_gpu, missing_tensorrt
from vla_models.model_folder import load_head

FOLDER = Path(__file__).parents[2] / "models" / "tabletop"
MANIFEST = load_manifest(FOLDER)
SHAPES = DenoiserShapes.of(MANIFEST)
H, N = SHAPES.horizon, SHAPES.joints
ARM = N - 1  # the gripper's closure is neither smoothed nor a joint
TOLERANCE_RAD = 1e-5
"""Of any engine in float32 against float64: a twentieth of an encoder step of the arm."""


def make_engine(name, tmp_path_factory):
    if name == "onnxruntime":
        from vla_edge.adapters.denoiser_onnx import OnnxDenoiser

        return OnnxDenoiser(FOLDER, MANIFEST)
    if name == "torch":
        from vla_edge.adapters.denoiser_torch import TorchDenoiser

        return TorchDenoiser(FOLDER, MANIFEST)
    from vla_edge.adapters.denoiser_tensorrt import TensorRtDenoiser

    cache = EngineCache(tmp_path_factory.mktemp("engines"))
    if name == "tensorrt imitated":
        cuda = ImitatedCuda()
        return TensorRtDenoiser(FOLDER, MANIFEST, trt=imitated_tensorrt(cuda), cuda=cuda, cache=cache)
    return TensorRtDenoiser(FOLDER, MANIFEST, cache=cache)


NO_TENSORRT = missing_gpu() or missing_tensorrt()
ENGINES = ["onnxruntime", "torch", "tensorrt imitated", *([] if NO_TENSORRT else ["tensorrt"])]


@pytest.mark.skipif(NO_TENSORRT is not None, reason=f"TensorRT on a GPU: {NO_TENSORRT}")
def test_tensorrt_takes_part():
    """Its cases of this suite are left out where there is no GPU; this one says so."""
    assert "tensorrt" in ENGINES


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tmp_path_factory):
    return make_engine(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def reference():
    torch.set_num_threads(1)
    return load_head(FOLDER)[0].double()


def case(seed, scale=0.0):
    """(now, previous, proprio, age_s, gap_s, noise); ``scale`` of the noise."""
    rng = np.random.default_rng(seed)
    now, previous = rng.standard_normal((2, SHAPES.tokens, SHAPES.dim)).astype(np.float32)
    mean, std = (np.array(MANIFEST.normalisation[key]) for key in ("proprio_mean", "proprio_std"))
    proprio = (mean + 0.3 * std * rng.standard_normal(SHAPES.proprio)).astype(np.float32)
    noise = (scale * rng.standard_normal((H, N))).astype(np.float32)
    return now, previous, proprio, float(rng.uniform(0.05, 0.4)), float(rng.uniform(0.2, 0.8)), noise


def run(engine, values, prefix=None):
    now, previous, *rest = values
    return engine.denoise(engine.encode_context(now, previous), *rest, prefix)


def exact(head, values, prefix=None):
    now, previous, proprio, age_s, gap_s, noise = (torch.tensor(np.asarray(v, np.float64))[None] for v in values)
    extra = {}
    if prefix is not None:
        extra = {"prefix": torch.tensor(prefix.actions.astype(np.float64))[None],
                 "prefix_weight": torch.tensor(prefix.weights.astype(np.float64))[None, :, None]}
    with torch.no_grad():
        kv = head.context_kv(now, previous)
        return head.denoise(kv, proprio, age_s[:, None], gap_s[:, None], noise, **extra)[0].numpy()


def mask(frozen, guided=0):
    weights = np.zeros(H, np.float32)
    weights[:frozen] = 1.0
    weights[frozen:frozen + guided] = np.linspace(0.9, 0.1, guided)
    return weights


def like_a_plan(engine, values, seed):
    """A prefix such as a chunk before would leave: smooth, near to what the model wants, but not the same."""
    steps = np.arange(1, H + 1, dtype=np.float32)[:, None] / H
    offset = np.random.default_rng(seed).uniform(-0.01, 0.01, (2, N)).astype(np.float32)
    return run(engine, values) + offset[0] * steps + offset[1] * steps**2


# ------------------------------------------------------------------ without a prefix


def test_chunks_agree_with_float64(engine, reference):
    worst = 0.0
    for seed in range(12):
        values = case(seed, scale=0.0 if seed < 6 else 1.0)
        worst = max(worst, float(np.abs(run(engine, values) - exact(reference, values)).max()))
    print(f"{engine.engine}: at most {worst:.1e} rad from float64")
    assert 0.0 < worst < TOLERANCE_RAD


def test_equal_inputs_give_equal_bits(engine):
    values = case(1, scale=1.0)
    first, other, again = run(engine, values), run(engine, case(2)), run(engine, values)
    assert first.tobytes() == again.tobytes() != other.tobytes()
    assert first.shape == (H, N) and first.dtype == np.float32


def test_noise_and_state_and_context_matter(engine):
    values = case(3)
    base = run(engine, values)
    other = case(12, scale=1.0)
    for index in range(6):
        changed = [*values[:index], other[index], *values[index + 1:]]
        assert np.abs(run(engine, changed) - base).max() > 1e-5, index


def test_a_handle_owns_its_memory(engine):
    a, b = case(4), case(5)
    handle = engine.encode_context(a[0], a[1])
    alone = engine.denoise(handle, *a[2:])
    tokens = [np.array(b[0]), np.array(b[1])]
    others = [engine.encode_context(*tokens) for _ in range(3)]
    for token in tokens:
        token[:] = 7.0  # the caller may use its arrays again
    assert engine.denoise(handle, *a[2:]).tobytes() == alone.tobytes()
    expected = run(engine, b)
    assert engine.denoise(others[0], *b[2:]).tobytes() == expected.tobytes()
    del others
    assert engine.denoise(handle, *a[2:]).tobytes() == alone.tobytes()
    first, second = engine.encode_context(a[0], a[1]), engine.encode_context(b[0], b[1])  # nothing waits in between
    assert engine.denoise(first, *a[2:]).tobytes() == alone.tobytes()
    assert engine.denoise(second, *b[2:]).tobytes() == expected.tobytes()


def test_a_chunk_is_not_overwritten_by_the_next(engine):
    first = run(engine, case(6))
    kept = first.copy()
    run(engine, case(7))
    assert first.tobytes() == kept.tobytes()


@pytest.mark.parametrize("which", [0, 2, 5])
def test_what_is_not_finite_comes_out_not_finite_and_is_over_after_it(engine, which):
    values = list(case(8))
    before = run(engine, values)
    poisoned = [np.array(v) for v in values[:3]] + [*values[3:5], np.array(values[5])]
    poisoned[which].flat[0] = np.nan
    assert not np.isfinite(run(engine, poisoned)).all()
    assert run(engine, values).tobytes() == before.tobytes()


def test_wrong_shapes_are_named(engine):
    now, previous, proprio, age_s, gap_s, noise = case(9)
    with pytest.raises(DenoiserError, match=r"context must be float32\[16, 128\], got shape \[16, 64\]"):
        engine.encode_context(now[:, :64], previous)
    with pytest.raises(DenoiserError, match=r"context_prev must be .* got shape \[15, 128\]"):
        engine.encode_context(now, previous[1:])
    handle = engine.encode_context(now, previous)
    with pytest.raises(DenoiserError, match=r"proprio must be float32\[9\], got shape \[8\]"):
        engine.denoise(handle, proprio[:8], age_s, gap_s, noise)
    with pytest.raises(DenoiserError, match=r"noise must be float32\[16, 8\], got shape \[8, 16\]"):
        engine.denoise(handle, proprio, age_s, gap_s, noise.T)


def test_the_latency_report_counts_what_it_measures(engine):
    report = measure_latency(engine, MANIFEST, SystemClock(), rounds=5)
    assert set(report) == {"encode", "denoise"}
    for latency in report.values():
        assert latency.rounds == 5 and 0.0 < latency.p50_ms <= latency.p99_ms <= latency.p999_ms <= latency.max_ms


# ------------------------------------------------------------------ with a prefix


def test_chunks_with_a_prefix_agree_with_float64(engine, reference):
    for seed, (frozen, guided) in enumerate([(1, 0), (2, 9), (5, 6), (8, 3), (0, 8), (15, 1)]):
        values = case(20 + seed)
        prefix = Prefix(like_a_plan(engine, values, seed), mask(frozen, guided))
        assert np.abs(run(engine, values, prefix) - exact(reference, values, prefix)).max() < TOLERANCE_RAD


def test_no_weight_is_no_prefix(engine):
    values = case(30)
    prefix = Prefix(np.full((H, N), np.nan, np.float32), mask(0))
    np.testing.assert_allclose(run(engine, values, prefix), run(engine, values), rtol=0, atol=2e-7)


@pytest.mark.parametrize("frozen", [1, 2, 3, 4, 7, 15, 16])
def test_frozen_rows_come_out_exactly(engine, frozen):
    """Also where the prefix disagrees with the model by far."""
    values = case(31)
    actions = np.random.default_rng(frozen).uniform(-0.2, 0.2, (H, N)).astype(np.float32)
    out = run(engine, values, Prefix(actions, mask(frozen, min(3, H - frozen))))
    assert out[:frozen].tobytes() == actions[:frozen].tobytes()
    assert np.isfinite(out).all() and (frozen == H or (out[frozen:] != actions[frozen:]).any())


def test_rows_without_weight_are_not_looked_at(engine):
    values = case(32)
    actions = like_a_plan(engine, values, 0)
    poisoned = actions.copy()
    poisoned[6:] = np.nan
    weights = mask(3, 3)
    assert run(engine, values, Prefix(poisoned, weights)).tobytes() == run(engine, values, Prefix(actions, weights)).tobytes()


def test_a_poisoned_frozen_row_shows(engine):
    actions = np.zeros((H, N), np.float32)
    actions[0, 0] = np.nan
    assert not np.isfinite(run(engine, case(33), Prefix(actions, mask(2)))).all()


@pytest.mark.parametrize("frozen", [1, 2, 5, 8])
def test_free_rows_go_on_where_the_frozen_ones_end(engine, frozen):
    """No step in position, speed or acceleration at the seam, measured against the step a cut would leave there."""
    for seed in range(4):
        values = case(40 + seed)
        actions = like_a_plan(engine, values, seed)
        joined = run(engine, values, Prefix(actions, mask(frozen, 11 - frozen)))[:, :ARM]
        cut = np.vstack([actions[:frozen, :ARM], run(engine, values)[frozen:, :ARM]])
        for chunk in (joined, cut):
            assert np.isfinite(chunk).all()
        rows = slice(max(0, frozen - 2), frozen + 1)  # third differences that reach over the seam
        jerk = [np.abs(np.diff(np.vstack([np.zeros((1, ARM)), chunk]), n=3, axis=0)[rows]).max() for chunk in (joined, cut)]
        assert jerk[0] < 0.25 * jerk[1]


def test_guided_rows_lean_towards_the_prefix(engine):
    values = case(50)
    free = run(engine, values)
    actions = free + np.linspace(0.02 / H, 0.02, H, dtype=np.float32)[:, None]
    soft = run(engine, values, Prefix(actions, mask(2, 10)))
    firm = run(engine, values, Prefix(actions, np.r_[np.ones(2), np.full(10, 0.9), np.zeros(4)].astype(np.float32)))
    near = [float(np.abs(chunk[2:8, :ARM] - actions[2:8, :ARM]).mean()) for chunk in (firm, soft, free)]
    assert near[0] < near[1] < near[2]


@pytest.mark.parametrize("weights", [np.full(H, 1.5), np.full(H, -0.1), np.linspace(0, 1, H), np.full(H, np.nan)])
def test_weights_that_make_no_sense_are_refused(engine, weights):
    with pytest.raises(DenoiserError, match=r"prefix weights must lie in 0 \.\. 1 and not rise"):
        run(engine, case(51), Prefix(np.zeros((H, N), np.float32), weights.astype(np.float32)))


def test_a_prefix_of_another_shape_is_refused(engine):
    with pytest.raises(DenoiserError, match=r"prefix actions must be float32\[16, 8\]"):
        run(engine, case(52), Prefix(np.zeros((H, 7), np.float32), mask(2)))
    with pytest.raises(DenoiserError, match=r"prefix weights must be float32\[16\]"):
        run(engine, case(52), Prefix(np.zeros((H, N), np.float32), mask(2)[:-1]))
