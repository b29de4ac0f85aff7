"""From an ONNX file to a TensorRT engine, for TensorRT 10.3 to 11. ``trt`` is the module: tensorrt, or one like it.

11 knows only strongly typed networks, has lost ``EXPLICIT_BATCH`` and the ``FP16`` flag; 10 has all of them. What only
one of them has is asked for by name before it is used.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from vla_edge.adapters.tensorrt_cache import EngineCache, EngineKey
from vla_edge.core.denoiser import DenoiserError

LOG = logging.getLogger(__name__)

WORKSPACE_BYTES: Final = 256 << 20
FP32, FP16_TYPED, FP16_FLAG = "fp32", "fp16 by the graph's types", "fp16 by the builder"


def precision_for(trt: Any, wants_fp16: bool, has_typed_graph: bool) -> str:
    """How half precision is reached: by a graph that states it, else by the builder's flag, which only 10 has.

    Raises:
        DenoiserError: neither is possible.
    """
    if not wants_fp16:
        return FP32
    if has_typed_graph:
        return FP16_TYPED
    if hasattr(trt.BuilderFlag, "FP16"):
        return FP16_FLAG
    raise DenoiserError(f"TensorRT {trt.__version__} takes half precision from the model only: export it with "
                        "'vla export --fp16', or set policy.fp16 to false")


def network_flags(trt: Any, precision: str) -> int:
    """Bits for ``create_network``."""
    names = ["EXPLICIT_BATCH"] if precision == FP16_FLAG else ["EXPLICIT_BATCH", "STRONGLY_TYPED"]
    kinds = trt.NetworkDefinitionCreationFlag
    return sum(1 << int(getattr(kinds, name)) for name in names if hasattr(kinds, name))


def build_plan(trt: Any, logger: Any, file: str, onnx: bytes, precision: str) -> bytes:
    """Build a serialised engine; takes seconds to minutes.

    Args:
        trt: the module. logger: a ``trt.Logger``.
        file: name for messages. onnx: its content, weights inside.
        precision: one of this module's constants.

    Raises:
        DenoiserError: TensorRT cannot parse or build it.
    """
    builder = trt.Builder(logger)
    network = builder.create_network(network_flags(trt, precision))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(onnx):
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise DenoiserError(f"TensorRT {trt.__version__} cannot read {file}: {errors}. Check it with 'vla export "
                            "--check', or set policy.engine to onnxruntime")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    if precision == FP16_FLAG:
        config.set_flag(trt.BuilderFlag.FP16)
    # TF32 keeps 10 bits of a mantissa: on by default, and a thousand times coarser than what the model was checked to.
    config.clear_flag(trt.BuilderFlag.TF32)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise DenoiserError(f"TensorRT {trt.__version__} cannot build {file}; the reason is above in the log. Set "
                            "policy.engine to onnxruntime")
    return bytes(plan)


def load_engine(trt: Any, logger: Any, runtime: Any, cache: EngineCache, key: EngineKey, file: str, onnx: bytes) -> Any:
    """The deserialised engine for ``key``, from the cache or built.

    Raises:
        DenoiserError: TensorRT cannot parse, build or load it.
    """
    plan = cache.load(key)
    if plan is not None:
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is not None:
            return engine
        LOG.warning("TensorRT refuses its own cached engine for %s: building it again", file)
        cache.discard(key)
    LOG.warning("building the TensorRT engine for %s (%s) on %s: this takes up to minutes, once", file, key.precision,
                key.gpu)
    plan = build_plan(trt, logger, file, onnx, key.precision)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise DenoiserError(f"TensorRT {trt.__version__} does not load the engine it built for {file}; the reason is "
                            "above in the log. Set policy.engine to onnxruntime")
    cache.store(key, plan)
    return engine
