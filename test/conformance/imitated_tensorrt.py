"""TensorRT and the CUDA driver imitated on the CPU, strictly: only names that the real ones have, work deferred until the
stream is synchronised, capture only after a first run. ONNX Runtime computes what an engine would.

What the imitation cannot show is whether a real GPU computes the same; the same tests run there where one is.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime

from vla_edge.adapters.cuda_driver import CudaError, Gpu

PLAN = b"imitated plan\n"


class ImitatedCuda:
    """:class:`vla_edge.adapters.cuda_driver.CudaDriver` with host memory as device memory and a real queue."""

    def __init__(self, gpu: Gpu | None = None, can_capture: bool = True) -> None:
        self.gpu = gpu or Gpu("Imitated Orin", "8.7", "12.6")
        self.stream = 0x5717
        self.can_capture = can_capture
        self.memory: dict[int, Any] = {}
        self.queue: list[Callable[[], None]] = []
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.launches = 0

    def malloc(self, size: int) -> int:
        raw = ctypes.create_string_buffer(b"\xff" * (size + 256), size + 256)  # NaN everywhere, as in real life
        address = -(-ctypes.addressof(raw) // 256) * 256
        self.memory[address] = raw
        return address

    host_malloc = malloc

    def free(self, address: int) -> None:
        del self.memory[address]  # KeyError: freed twice, or never allocated

    host_free = free

    def put(self, work: Callable[[], None]) -> None:
        (self.queue if self.recording is None else self.recording).append(work)

    def to_device(self, device: int, host: int, size: int) -> None:
        self.put(lambda: ctypes.memmove(device, host, size) and None)

    to_host = on_device = to_device

    def synchronize(self) -> None:
        assert self.recording is None, "not allowed while capturing"
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def capture(self, work: Callable[[], None]) -> int:
        if not self.can_capture:
            raise CudaError("cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900)")
        self.recording = []
        try:
            work()
            self.graphs[len(self.graphs) + 1] = self.recording
        finally:
            self.recording = None
        return len(self.graphs)

    def launch(self, graph: int) -> None:
        self.launches += 1
        self.queue.extend(self.graphs[graph])

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]


def imitated_tensorrt(cuda: ImitatedCuda, version: str = "10.3.0") -> Any:
    """A ``tensorrt`` module. Version 10 has builder flags and EXPLICIT_BATCH, 11 has not."""
    is_10 = version.startswith("10")
    flags = {"TF32": 0, "STRICT_NANS": 1} | ({"FP16": 2, "INT8": 3} if is_10 else {})
    kinds = {"STRONGLY_TYPED": 1} | ({"EXPLICIT_BATCH": 0} if is_10 else {})
    trt = SimpleNamespace(
        __version__=version, float32=DataType.FLOAT, float16=DataType.HALF, TensorIOMode=TensorIOMode,
        MemoryPoolType=enum.IntEnum("MemoryPoolType", {"WORKSPACE": 0}),
        BuilderFlag=enum.IntEnum("BuilderFlag", flags),
        NetworkDefinitionCreationFlag=enum.IntEnum("NetworkDefinitionCreationFlag", kinds), Logger=Logger,
        built=[], refuse_parse=False, refuse_build=False, refuse_plans=set())
    trt.Builder = lambda logger: Builder(trt, logger)
    trt.OnnxParser = lambda network, logger: OnnxParser(trt, network, logger)
    trt.Runtime = lambda logger: Runtime(trt, cuda, logger)
    return trt


class DataType(enum.Enum):
    FLOAT, HALF, INT32 = 0, 1, 3


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = 0, 1, 2


class Logger:
    INFO, WARNING, ERROR = 3, 2, 1
    __slots__ = ("min_severity",)

    def __init__(self, min_severity: int = 2) -> None:
        self.min_severity = min_severity


class Network:
    __slots__ = ("_flags", "_onnx")

    def __init__(self, flags: int) -> None:
        self._flags, self._onnx = flags, b""


class BuilderConfig:
    __slots__ = ("_flags", "_limits")

    def __init__(self, trt: Any) -> None:
        self._flags, self._limits = {trt.BuilderFlag.TF32}, {}

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self._limits[pool] = size

    def set_flag(self, flag: Any) -> None:
        self._flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag)


class Builder:
    __slots__ = ("_trt",)

    def __init__(self, trt: Any, logger: Logger) -> None:
        assert isinstance(logger, Logger)
        self._trt = trt

    def create_network(self, flags: int = 0) -> Network:
        return Network(flags)

    def create_builder_config(self) -> BuilderConfig:
        return BuilderConfig(self._trt)

    def build_serialized_network(self, network: Network, config: BuilderConfig) -> memoryview | None:
        if self._trt.refuse_build:
            return None
        typed = bool(network._flags & 1 << self._trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        half = "FP16" in self._trt.BuilderFlag.__members__ and self._trt.BuilderFlag.FP16 in config._flags
        # Real TensorRT: "strongly typed networks do not take precision flags".
        assert not (typed and half)
        self._trt.built.append(SimpleNamespace(typed=typed, half=half, flags=network._flags, config=config))
        return memoryview(PLAN + network._onnx)


class OnnxParser:
    __slots__ = ("_network", "_trt", "num_errors")

    def __init__(self, trt: Any, network: Network, logger: Logger) -> None:
        self._trt, self._network, self.num_errors = trt, network, 0

    def parse(self, model: bytes) -> bool:
        if self._trt.refuse_parse:
            self.num_errors = 1
            return False
        onnx.load_from_string(model)
        self._network._onnx = model
        return True

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(desc=lambda: f"operator {index} is not supported")


class Runtime:
    __slots__ = ("_cuda", "_trt")

    def __init__(self, trt: Any, cuda: ImitatedCuda, logger: Logger) -> None:
        self._trt, self._cuda = trt, cuda

    def deserialize_cuda_engine(self, plan: bytes) -> CudaEngine | None:
        if not plan.startswith(PLAN) or hashlib.sha256(plan).digest() in self._trt.refuse_plans:
            return None
        return CudaEngine(self._cuda, plan[len(PLAN):])


class CudaEngine:
    __slots__ = ("_cuda", "_nodes", "_session", "num_io_tensors")

    def __init__(self, cuda: ImitatedCuda, model: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._cuda = cuda
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._nodes = [(node, TensorIOMode.INPUT) for node in self._session.get_inputs()]
        self._nodes += [(node, TensorIOMode.OUTPUT) for node in self._session.get_outputs()]
        self.num_io_tensors = len(self._nodes)

    def _node(self, name: str) -> Any:
        return next(pair for pair in self._nodes if pair[0].name == name)

    def get_tensor_name(self, index: int) -> str:
        return str(self._nodes[index][0].name)

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self._node(name)[1]  # type: ignore[no-any-return]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(n if isinstance(n, int) else -1 for n in self._node(name)[0].shape)

    def get_tensor_dtype(self, name: str) -> DataType:
        return {"tensor(float)": DataType.FLOAT, "tensor(float16)": DataType.HALF}.get(
            self._node(name)[0].type, DataType.INT32)

    def create_execution_context(self) -> ExecutionContext:
        return ExecutionContext(self)


class ExecutionContext:
    __slots__ = ("_addresses", "_engine", "_has_run")

    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self._addresses, self._has_run = engine, {}, False

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._engine._node(name)
        self._addresses[name] = memory
        return memory % 256 == 0

    def execute_async_v3(self, stream_handle: int) -> bool:
        cuda, engine = self._engine._cuda, self._engine
        assert stream_handle == cuda.stream and len(self._addresses) == engine.num_io_tensors
        if cuda.recording is not None and not self._has_run:
            return False
        self._has_run = True
        cuda.put(self._compute)
        return True

    def _compute(self) -> None:
        def view(name: str) -> np.ndarray:
            shape = self._engine.get_tensor_shape(name)
            count = int(np.prod(shape))
            return np.ctypeslib.as_array((ctypes.c_float * count).from_address(self._addresses[name])).reshape(shape)

        session = self._engine._session
        outputs = [node.name for node in session.get_outputs()]
        values = session.run(outputs, {node.name: view(node.name).copy() for node in session.get_inputs()})
        for name, value in zip(outputs, values, strict=True):
            view(name)[...] = value
