"""The CUDA driver by ctypes: which GPU is there, and the few calls that an engine needs.

Only ``libcuda.so.1``: it comes with the driver, on a Jetson too, and its interface is the same from CUDA 11.4 to 13, so
nothing depends on a toolkit or on cuda-python. The device's primary context is used, which TensorRT uses too.
Reference: "CUDA Driver API", sections 6.5 (device), 6.7 (primary context), 6.13 (memory), 6.18 (stream), 6.24 (graph).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"

_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76
_STREAM_NON_BLOCKING: Final = 1
_CAPTURE_THREAD_LOCAL: Final = 1

# Result is an int everywhere. CUdevice is an int, CUdeviceptr a 64 bit number, every other handle a pointer.
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemAllocHost_v2": (POINTER(c_void_p), c_size_t),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
}


class CudaError(RuntimeError):
    """There is no driver or GPU, or a call failed; the message names it."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU: name, compute capability ("8.7"), and the newest CUDA version that the driver serves ("12.6")."""

    name: str
    compute: str
    driver_cuda: str


def _load(library: str) -> Any:
    try:
        lib = ctypes.CDLL(library)
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from error
    for name, arguments in _SIGNATURES.items():
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise CudaError(f"the CUDA driver is too old: it has no {name}; CUDA 11.4 or newer is needed") from error
        function.argtypes, function.restype = list(arguments), c_int
    return lib


def find_gpu(library: str = LIBRARY) -> Gpu:
    """Look for the first GPU.

    Raises:
        CudaError: no driver or no GPU; the message says which.
    """
    return CudaDriver(library).gpu


class CudaDriver:
    """Memory, one stream and graphs on the first GPU. Addresses and handles are plain ints. Not thread-safe."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Load the driver and look at the first GPU; nothing is allocated yet.

        Raises:
            CudaError: no driver or no GPU.
        """
        self._lib = _load(library)
        self._call("cuInit", 0)
        count, device, version = c_int(), c_int(), c_int()
        self._call("cuDeviceGetCount", byref(count))
        if count.value == 0:
            raise CudaError("the CUDA driver is there, but it sees no GPU")
        self._call("cuDeviceGet", byref(device), 0)
        self._call("cuDriverGetVersion", byref(version))
        self._device = device.value
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, len(name), self._device)
        major, minor = (self._attribute(attribute) for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR))
        self.gpu = Gpu(name.value.decode(errors="replace"), f"{major}.{minor}",
                       f"{version.value // 1000}.{version.value % 1000 // 10}")
        self._stream = 0

    @property
    def stream(self) -> int:
        """The one stream, a ``CUstream`` (the same as a ``cudaStream_t``)."""
        if not self._stream:
            context, stream = c_void_p(), c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), self._device)
            self._call("cuCtxSetCurrent", context)
            self._call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
            self._stream = stream.value or 0
        return self._stream

    def malloc(self, size: int) -> int:
        """Device memory, 256-byte aligned."""
        assert self.stream
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._call("cuMemFree_v2", address)

    def host_malloc(self, size: int) -> int:
        """Page-locked host memory, which the GPU copies from and to without a detour."""
        assert self.stream
        address = c_void_p()
        self._call("cuMemAllocHost_v2", byref(address), size)
        return address.value or 0

    def host_free(self, address: int) -> None:
        """Give host memory back."""
        self._call("cuMemFreeHost", address)

    def to_device(self, device: int, host: int, size: int) -> None:
        """Copy ``size`` bytes on the stream."""
        self._call("cuMemcpyHtoDAsync_v2", device, host, size, self.stream)

    def to_host(self, host: int, device: int, size: int) -> None:
        """Copy ``size`` bytes on the stream."""
        self._call("cuMemcpyDtoHAsync_v2", host, device, size, self.stream)

    def on_device(self, target: int, source: int, size: int) -> None:
        """Copy ``size`` bytes on the stream."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, self.stream)

    def synchronize(self) -> None:
        """Wait for everything on the stream; an error of earlier work shows here."""
        self._call("cuStreamSynchronize", self.stream)

    def capture(self, work: Callable[[], None]) -> int:
        """Record what ``work`` puts on the stream, without running it.

        Returns:
            A graph for :meth:`launch`.

        Raises:
            CudaError: something in it cannot be captured; the stream can be used as before.
        """
        graph, executable = c_void_p(), c_void_p()
        self._call("cuStreamBeginCapture_v2", self.stream, _CAPTURE_THREAD_LOCAL)
        try:
            work()
        finally:
            # Must come in any case: until then the stream runs nothing.
            code = self._lib.cuStreamEndCapture(self.stream, byref(graph))
        self._check("cuStreamEndCapture", code)
        try:
            self._call("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)
        return executable.value or 0

    def launch(self, graph: int) -> None:
        """Run a captured graph on the stream."""
        self._call("cuGraphLaunch", graph, self.stream)

    def destroy_graph(self, graph: int) -> None:
        """Give a captured graph back."""
        self._call("cuGraphExecDestroy", graph)

    def close(self) -> None:
        """Destroy the stream. Memory and graphs must have been given back."""
        if self._stream:
            self._call("cuStreamDestroy_v2", self._stream)
            self._stream = 0

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, self._device)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._lib, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code == 0:
            return
        text = c_char_p()
        self._lib.cuGetErrorName(code, byref(text))
        raise CudaError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")
