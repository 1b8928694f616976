"""Copies small pieces by a few CTAs that read or write pinned host memory: two kernels, compiled at start.

`bulk` (Hopper and later): one thread of a CTA moves units through shared memory by the bulk copy unit; `lag` loads are
under way before the first store, so a single CTA hides the way to the host. `threads` (everywhere): 16 bytes a thread,
eight loads in flight each. The pieces travel as the kernel's parameter (32 KiB at most since CUDA 12.1), so a launch
needs no memory of its own and reads no descriptor over PCIe.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.cuda_driver import CudaDriver
from engine_adapter.copying.plan import Pieces
from kvstore.errors import KvstoreError, MissingExtra

__all__ = ["MAX_PIECES", "CopyKernel", "KernelKind", "KernelShape"]

MAX_PIECES = 2040
"""Of one launch: 16 bytes each, within a parameter of 32,764 bytes."""
ALIGNMENT_BYTES = 16
"""Of addresses and sizes."""


class KernelKind(Enum):
    """Which kernel."""

    BULK = "bulk"
    THREADS = "threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """What a kernel takes of the device. `stages`, `lag` and `unit_bytes` are of `bulk`, `threads` of the other."""

    kind: KernelKind
    ctas: int
    """Most SMs that are taken from the engine."""
    unit_bytes: int = 16 << 10
    stages: int = 8
    """Units in shared memory."""
    lag: int = 6
    """Units whose load is under way; the others are being stored."""
    threads: int = 512

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        return self.unit_bytes * self.stages if self.kind is KernelKind.BULK else 0

    @property
    def cta_threads(self) -> int:
        """Threads of one CTA."""
        return 32 if self.kind is KernelKind.BULK else self.threads


class CopyKernel:
    """A compiled kernel. One thread at a time."""

    def __init__(self, driver: CudaDriver, shape: KernelShape) -> None:
        """Compiles, about 0.3 s the first time on a machine. Raises: MissingExtra, KvstoreError."""
        major, minor = driver.compute_capability
        if shape.kind is KernelKind.BULK and major < 9:
            raise KvstoreError(f"bulk copies need compute capability 9.0, this device has {major}.{minor}")
        self._driver = driver
        self._shape = shape
        self._kernel = _compiled(driver.device_index, shape)

    def launch(self, pieces: Pieces, stream: int) -> None:
        """Copies pieces of one size, at most MAX_PIECES, all aligned to 16 bytes, of memory that the device sees."""
        shape = self._shape
        self._driver.launch(
            self._kernel.kernel.ptr,
            ctas=shape.ctas,
            threads=shape.cta_threads,
            shared_bytes=shape.shared_bytes,
            stream=stream,
            argument=_argument(pieces),
        )


def _argument(pieces: Pieces) -> bytes:
    """`Work` of the source below."""
    pairs: NDArray[np.uint64] = np.zeros((MAX_PIECES, 2), dtype=np.uint64)
    pairs[: len(pieces), 0] = pieces.sources
    pairs[: len(pieces), 1] = pieces.targets
    return pairs.tobytes() + struct.pack("<QQ", int(pieces.sizes[0]), len(pieces))


def _defines(shape: KernelShape) -> tuple[str, ...]:
    assert 0 < shape.lag < shape.stages, "a stage that is loaded has been stored before"
    values = {
        "MAX_PIECES": MAX_PIECES,
        "UNIT": shape.unit_bytes,
        "STAGES": shape.stages,
        "LAG": shape.lag,
        "THREADS": shape.threads,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


def _compiled(device_index: int, shape: KernelShape) -> Any:
    """The kernel as cupy compiles it for a device, or finds it compiled. Raises: as CopyKernel."""
    try:
        import cupy
    except ImportError:
        raise MissingExtra("copy kernels need cupy: pip install 'kvstore[cuda]'") from None
    with cupy.cuda.Device(device_index):
        try:
            module = cupy.RawModule(code=_SOURCE, options=("-std=c++17", *_defines(shape)), backend="nvrtc")
            kernel = module.get_function(f"copy_{shape.kind.value}")
            if shape.shared_bytes:
                kernel.max_dynamic_shared_size_bytes = shape.shared_bytes
            assert kernel.kernel.ptr, "loaded by asking"
        except (cupy.cuda.compiler.CompileException, cupy.cuda.driver.CUDADriverError) as error:
            raise KvstoreError(
                f"the copy kernel does not compile: {str(error).strip().partition(chr(10))[0]}"
            ) from None
    return kernel


_SOURCE = r"""
struct Piece { const unsigned char* source; unsigned char* target; };
struct Work { Piece pieces[MAX_PIECES]; unsigned long long nbytes; unsigned long long count; };

// Units of one size are dealt to the CTAs in turns; the last one of a piece may be shorter.
struct Unit { const unsigned char* source; unsigned char* target; unsigned nbytes; };

__device__ __forceinline__ Unit unit_of(const Work& work, unsigned long long index, unsigned per, unsigned unit)
{
    const unsigned piece = unsigned(index / per);
    const unsigned long long offset = (index - (unsigned long long)piece * per) * unit;
    const unsigned long long left = work.nbytes - offset;
    return { work.pieces[piece].source + offset, work.pieces[piece].target + offset,
             unsigned(left < unit ? left : unit) };
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_threads(const __grid_constant__ Work work)
{
    const unsigned unit = 4096;  // of a warp: eight times 16 bytes a thread
    const unsigned per = unsigned((work.nbytes + unit - 1) / unit);
    const unsigned long long total = work.count * per;
    const unsigned lane = threadIdx.x % 32;
    const unsigned step = gridDim.x * (THREADS / 32);
    for (unsigned long long i = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; i < total; i += step) {
        const Unit u = unit_of(work, i, per, unit);
        const uint4* source = reinterpret_cast<const uint4*>(u.source) + lane;
        uint4* target = reinterpret_cast<uint4*>(u.target) + lane;
        uint4 held[8];
        if (u.nbytes == unit) {
            #pragma unroll
            for (int k = 0; k < 8; ++k) held[k] = __ldcs(source + 32 * k);
            #pragma unroll
            for (int k = 0; k < 8; ++k) __stcs(target + 32 * k, held[k]);
        } else {
            for (unsigned at = lane * 16; at < u.nbytes; at += 512, source += 32, target += 32)
                __stcs(target, __ldcs(source));
        }
    }
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned shared_address(const void* pointer)
{
    return unsigned(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void load(unsigned stage, const Unit& u, unsigned barrier)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(u.nbytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(stage), "l"(u.source), "r"(u.nbytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void await_load(unsigned barrier, unsigned parity)
{
    unsigned done;
    do {
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     " selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

__device__ __forceinline__ void store(unsigned stage, const Unit& u)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(u.target), "r"(stage), "r"(u.nbytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(32) copy_bulk(const __grid_constant__ Work work)
{
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(8) unsigned long long barriers[STAGES];
    if (threadIdx.x != 0) return;
    for (int i = 0; i < STAGES; ++i)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(&barriers[i])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

    const unsigned per = unsigned((work.nbytes + UNIT - 1) / UNIT);
    const unsigned long long total = work.count * per;
    const unsigned long long mine =
        total > blockIdx.x ? (total - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    const unsigned base = shared_address(stages);
    for (unsigned long long i = 0; i < mine + LAG; ++i) {
        if (i < mine) {
            const unsigned stage = unsigned(i % STAGES);
            // i - LAG stores were committed; that of i - STAGES has left the stage when only those after it read.
            if (i >= STAGES) asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(STAGES - LAG - 1) : "memory");
            load(base + stage * UNIT, unit_of(work, blockIdx.x + i * gridDim.x, per, UNIT),
                 shared_address(&barriers[stage]));
        }
        if (i >= LAG) {
            const unsigned long long j = i - LAG;
            const unsigned stage = unsigned(j % STAGES);
            await_load(shared_address(&barriers[stage]), unsigned(j / STAGES) & 1);
            store(base + stage * UNIT, unit_of(work, blockIdx.x + j * gridDim.x, per, UNIT));
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __threadfence_system();
}
#endif
"""
