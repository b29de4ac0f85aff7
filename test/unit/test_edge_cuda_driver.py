"""The calls to the CUDA driver, against a small one written in C: argument widths, order and results are those of cuda.h."""

import ctypes
import shutil
import subprocess

import pytest

from vla_edge.adapters.cuda_driver import CudaDriver, CudaError, find_gpu

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int CUdevice, CUresult; typedef uint64_t CUdeviceptr; typedef void *CUstream, *CUgraph, *CUgraphExec, *CUcontext;
#ifndef DEVICES
#define DEVICES 1
#endif
enum { INVALID = 1, CAPTURE = 900 };
struct copy { void *to; const void *from; size_t size; };
struct graph { int count; struct copy copies[8]; };
static struct graph *recording; static int initialised, current, streams; static char stream_object, context_object;
CUresult cuInit(unsigned flags) { initialised = 1; return flags; }
CUresult cuDriverGetVersion(int *v) { *v = 12060; return 0; }
CUresult cuDeviceGetCount(int *n) { *n = DEVICES; return !initialised; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i + 40; return i; }
CUresult cuDeviceGetName(char *name, int size, CUdevice d) { strncpy(name, "Toy", size); return d != 40; }
CUresult cuDeviceGetAttribute(int *v, int a, CUdevice d) { *v = a == 75 ? 8 : a == 76 ? 7 : -1; return d != 40; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = &context_object; return d != 40; }
CUresult cuCtxSetCurrent(CUcontext c) { current = c == &context_object; return !current; }
CUresult cuGetErrorName(CUresult e, const char **s) { *s = e == CAPTURE ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_INVALID_VALUE"; return 0; }
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) { *p = (CUdeviceptr)aligned_alloc(256, (n + 255) / 256 * 256); return !current; }
CUresult cuMemFree_v2(CUdeviceptr p) { free((void *)p); return 0; }
CUresult cuMemAllocHost_v2(void **p, size_t n) { *p = malloc(n); return !current; }
CUresult cuMemFreeHost(void *p) { free(p); return 0; }
static CUresult put(void *to, const void *from, size_t n, CUstream s) {
    if (s != &stream_object || n > 1u << 30) return INVALID;
    if (!recording) { memcpy(to, from, n); return 0; }
    recording->copies[recording->count++] = (struct copy){to, from, n}; return 0; }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *h, size_t n, CUstream s) { return put((void *)d, h, n, s); }
CUresult cuMemcpyDtoHAsync_v2(void *h, CUdeviceptr d, size_t n, CUstream s) { return put(h, (void *)d, n, s); }
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr e, size_t n, CUstream s) { return put((void *)d, (void *)e, n, s); }
CUresult cuStreamCreate(CUstream *s, unsigned flags) { streams++; *s = &stream_object; return flags != 1; }
CUresult cuStreamDestroy_v2(CUstream s) { return --streams || s != &stream_object; }
CUresult cuStreamSynchronize(CUstream s) { return recording ? CAPTURE : s != &stream_object; }
CUresult cuStreamBeginCapture_v2(CUstream s, int mode) { recording = calloc(1, sizeof *recording); return mode != 1 || s != &stream_object; }
CUresult cuStreamEndCapture(CUstream s, CUgraph *g) { *g = recording; recording = 0; return s != &stream_object; }
CUresult cuGraphInstantiateWithFlags(CUgraphExec *x, CUgraph g, unsigned long long flags) {
    *x = malloc(sizeof(struct graph)); memcpy(*x, g, sizeof(struct graph)); return flags != 0; }
CUresult cuGraphDestroy(CUgraph g) { free(g); return 0; }
CUresult cuGraphExecDestroy(CUgraphExec x) { free(x); return 0; }
CUresult cuGraphLaunch(CUgraphExec x, CUstream s) {
    struct graph *g = x; for (int i = 0; i < g->count; i++) put(g->copies[i].to, g->copies[i].from, g->copies[i].size, s);
    return 0; }
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")

    def make(name, *flags, source=SOURCE):
        (folder / f"{name}.c").write_text(source)
        subprocess.run([compiler, "-shared", "-fPIC", "-Wall", *flags, "-o", folder / f"{name}.so", folder / f"{name}.c"],
                       check=True)
        return str(folder / f"{name}.so")

    return make


@pytest.fixture(scope="module")
def library(build):
    return build("libcuda")


def test_the_gpu_is_described(library):
    gpu = find_gpu(library)
    assert (gpu.name, gpu.compute, gpu.driver_cuda) == ("Toy", "8.7", "12.6")


def test_no_driver_no_gpu_and_an_old_driver_are_told_apart(build, tmp_path):
    with pytest.raises(CudaError, match="no CUDA driver: .*nowhere"):
        find_gpu(str(tmp_path / "nowhere.so"))
    with pytest.raises(CudaError, match="sees no GPU"):
        find_gpu(build("none", "-DDEVICES=0"))
    with pytest.raises(CudaError, match="too old: it has no cuGraphInstantiateWithFlags"):
        find_gpu(build("old", source=SOURCE.replace("cuGraphInstantiateWithFlags", "cuGraphInstantiate")))


def test_bytes_go_there_and_back(library):
    cuda = CudaDriver(library)
    host, back = cuda.host_malloc(64), cuda.host_malloc(64)
    first, second = cuda.malloc(64), cuda.malloc(64)
    assert first % 256 == second % 256 == 0
    ctypes.memmove(host, bytes(range(64)), 64)
    cuda.to_device(first, host, 64)
    cuda.on_device(second, first, 64)
    cuda.to_host(back, second, 64)
    cuda.synchronize()
    assert ctypes.string_at(back, 64) == bytes(range(64))
    for address in (first, second):
        cuda.free(address)
    for address in (host, back):
        cuda.host_free(address)
    cuda.close()
    cuda.close()


def test_captured_work_runs_when_launched_and_not_before(library):
    cuda = CudaDriver(library)
    host, device = cuda.host_malloc(8), cuda.malloc(8)
    ctypes.memmove(device, b"before!!", 8)
    graph = cuda.capture(lambda: cuda.to_device(device, host, 8))
    ctypes.memmove(host, b"after!!!", 8)
    assert ctypes.string_at(device, 8) == b"before!!"
    cuda.launch(graph)
    cuda.synchronize()
    assert ctypes.string_at(device, 8) == b"after!!!"
    cuda.destroy_graph(graph)
    cuda.free(device)
    cuda.host_free(host)


def test_a_failed_capture_leaves_the_stream_usable(library):
    cuda = CudaDriver(library)
    with pytest.raises(CudaError, match=r"cuStreamSynchronize failed: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED \(900\)"):
        cuda.capture(cuda.synchronize)
    cuda.synchronize()


def test_a_failing_call_is_named(library):
    cuda = CudaDriver(library)
    with pytest.raises(CudaError, match=r"cuMemcpyHtoDAsync_v2 failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        cuda.to_device(256, 256, 1 << 31)
