"""Two TensorRT engines on one stream, replayed as CUDA graphs.

    encode   host ─▶ context, context_prev ─▶ [context_kv] ─▶ k, v, keypoint (stay on the GPU) ─▶ copy for the handle
    denoise  host ─▶ proprio, age_s, ...   ─▶ [denoise]    ─▶ actions ─▶ host

The keys and values of the context never leave the GPU: both engines use the same memory for them, and a handle keeps a
copy there. Everything the GPU reads or writes lies at fixed addresses, so that copies and kernels can be captured once
and then launched by one call; where capturing fails, the same work is put on the stream each time.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from vla_edge.adapters.cuda_driver import CudaError
from vla_edge.core.denoiser import DenoiserError, FloatArray
from vla_edge.core.denoiser_io import PREFIX_NAMES, DenoiserShapes, Shape, check_tensors

LOG = logging.getLogger(__name__)

_ALIGNMENT: Final = 256  # of tensor addresses, as TensorRT asks for


class Handle:
    """A context on the GPU; its memory goes back to the pool when nobody refers to it any more."""

    def __init__(self, pool: list[int], address: int) -> None:
        self.address = address
        weakref.finalize(self, pool.append, address)


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in one block of memory."""

    shapes: Mapping[str, Shape]
    offsets: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, Shape]) -> Layout:
        """One after the other, each aligned as TensorRT wants it; float32."""
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-4 * math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return cls(dict(shapes), offsets, end)

    def views(self, address: int) -> dict[str, FloatArray]:
        """Arrays over host memory at ``address``."""
        return {name: np.ctypeslib.as_array((ctypes.c_float * math.prod(shape)).from_address(
            address + self.offsets[name])).reshape(shape) for name, shape in self.shapes.items()}


class _Block:
    """One block on the GPU with its twin in page-locked host memory, so that one copy moves all its tensors."""

    def __init__(self, cuda: Any, shapes: Mapping[str, Shape]) -> None:
        self.layout = Layout.of(shapes)
        self._cuda = cuda
        self.device, self._host = cuda.malloc(self.layout.size), cuda.host_malloc(self.layout.size)
        ctypes.memset(self._host, 0, self.layout.size)
        self.arrays = self.layout.views(self._host)

    def addresses(self) -> dict[str, int]:
        return {name: self.device + offset for name, offset in self.layout.offsets.items()}

    def send(self) -> None:
        self._cuda.to_device(self.device, self._host, self.layout.size)

    def fetch(self) -> None:
        self._cuda.to_host(self._host, self.device, self.layout.size)

    def close(self) -> None:
        self.arrays = {}
        self._cuda.free(self.device)
        self._cuda.host_free(self._host)


class Runner:
    """Both engines with their memory."""

    def __init__(self, trt: Any, cuda: Any, shapes: DenoiserShapes, context: tuple[str, Any], denoise: tuple[str, Any],
                 precision: str) -> None:
        self.precision = precision
        self._cuda = cuda
        encoder, head = _tensors_of(trt, *context), _tensors_of(trt, *denoise)
        check_tensors(context[0], "inputs", encoder[0], shapes.context_inputs())
        check_tensors(context[0], "outputs", encoder[1], shapes.handle())
        kept = {name: shape for name, (_, shape) in encoder[1].items()}
        wanted = {**shapes.denoise_inputs(with_prefix=True), **kept}
        check_tensors(denoise[0], "inputs", head[0], wanted, PREFIX_NAMES)
        check_tensors(denoise[0], "outputs", head[1], shapes.denoise_outputs())
        self.with_prefix = PREFIX_NAMES[0] in head[0]
        own = {name: shape for name, (_, shape) in head[0].items() if name not in kept}
        self._contexts = _Block(cuda, {name: shape for name, (_, shape) in encoder[0].items()})
        self._state, self._actions = _Block(cuda, own), _Block(cuda, {name: s for name, (_, s) in head[1].items()})
        self._kept = Layout.of(kept)
        self._kept_at = cuda.malloc(self._kept.size)
        handle = {name: self._kept_at + offset for name, offset in self._kept.offsets.items()}
        self._encode = _bind(context, {**self._contexts.addresses(), **handle})
        self._denoise = _bind(denoise, {**handle, **self._state.addresses(), **self._actions.addresses()})
        self._pool: list[int] = []
        self._owned: list[int] = []
        self._loaded: weakref.ref[Handle] | None = None
        self._graphs: dict[Callable[[], None], int] = {}

    @property
    def is_captured(self) -> bool:
        """Both jobs are replayed as CUDA graphs."""
        return len(self._graphs) == 2

    def encode(self, feeds: Mapping[str, FloatArray]) -> Handle:
        """Run ``context_kv`` on what :func:`vla_edge.core.denoiser_io.feed_context` made."""
        _fill(self._contexts.arrays, feeds)
        self._run(self._enqueue_encode)
        handle = Handle(self._pool, self._pool.pop() if self._pool else self._new())
        self._cuda.on_device(handle.address, self._kept_at, self._kept.size)
        # The host memory may be written again only when the copy from it is over.
        self._cuda.synchronize()
        self._loaded = weakref.ref(handle)
        return handle

    def denoise(self, handle: Handle, feeds: Mapping[str, FloatArray]) -> FloatArray:
        """Run ``denoise`` on what :func:`vla_edge.core.denoiser_io.feed_denoise` made: float32[H, n]."""
        if self._loaded is None or self._loaded() is not handle:
            self._cuda.on_device(self._kept_at, handle.address, self._kept.size)
            self._loaded = weakref.ref(handle)
        _fill(self._state.arrays, feeds)
        self._run(self._enqueue_denoise)
        self._cuda.synchronize()
        return np.array(self._actions.arrays["actions"][0])

    def capture(self) -> None:
        """Record both jobs; they must have run before, because TensorRT sets itself up in the first run."""
        for work in (self._enqueue_encode, self._enqueue_denoise):
            try:
                self._graphs[work] = self._cuda.capture(work)
            except CudaError as error:
                LOG.warning("no CUDA graph (%s): kernels are launched one by one, which takes longer", error)
                return

    def close(self) -> None:
        """Give all memory back; handles are void after it."""
        for graph in self._graphs.values():
            self._cuda.destroy_graph(graph)
        self._graphs = {}
        for block in (self._contexts, self._state, self._actions):
            block.close()
        for address in (self._kept_at, *self._owned):
            self._cuda.free(address)
        self._owned = []

    def _new(self) -> int:
        self._owned.append(self._cuda.malloc(self._kept.size))
        return self._owned[-1]

    def _run(self, work: Callable[[], None]) -> None:
        graph = self._graphs.get(work)
        if graph is None:
            work()
        else:
            self._cuda.launch(graph)

    def _enqueue_encode(self) -> None:
        self._contexts.send()
        self._execute(self._encode)

    def _enqueue_denoise(self) -> None:
        self._state.send()
        self._execute(self._denoise)
        self._actions.fetch()

    def _execute(self, context: Any) -> None:
        if not context.execute_async_v3(self._cuda.stream):
            raise CudaError("TensorRT could not enqueue a graph; the reason is above in the log")


def _tensors_of(trt: Any, file: str, engine: Any) -> tuple[dict[str, tuple[str, Shape]], dict[str, tuple[str, Shape]]]:
    """(inputs, outputs): element type and shape by name."""
    names: Final = {trt.float32: "float32", trt.float16: "float16"}
    inputs: dict[str, tuple[str, Shape]] = {}
    outputs: dict[str, tuple[str, Shape]] = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        element, shape = engine.get_tensor_dtype(name), tuple(int(n) for n in engine.get_tensor_shape(name))
        if min(shape, default=0) < 0:
            raise DenoiserError(f"{file}: {name} has a dimension without a size {list(shape)}: export the model again "
                                "with 'vla export'")
        side = inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs
        side[name] = names.get(element, str(element)), shape
    return inputs, outputs


def _bind(graph: tuple[str, Any], addresses: Mapping[str, int]) -> Any:
    """An execution context with all its tensors in place."""
    file, engine = graph
    context = engine.create_execution_context()
    if context is None:
        raise DenoiserError(f"TensorRT has no room to run {file}: free memory of the GPU")
    for name, address in addresses.items():
        if not context.set_tensor_address(name, address):
            raise DenoiserError(f"TensorRT does not take the memory for {name} of {file}; see the log")
    return context


def _fill(arrays: Mapping[str, FloatArray], feeds: Mapping[str, FloatArray]) -> None:
    for name, array in arrays.items():
        array[...] = feeds[name]
