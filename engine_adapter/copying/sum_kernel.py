"""Takes the checksums of blocks that lie in HBM, by a kernel: bit for bit those of `tiers.nvme.trailer`.

XXH3 with 128 bits looks serial, and is so at one place only: after each KiB its eight lanes are scrambled. What comes
in between, nearly all of the work, is a sum of products, which may be taken in any order. So of a CTA all warps but one
sum up the KiB of a tile, and the first one chains the sums of the tile before: some ten instructions a KiB. A block
takes as long as one CTA takes to read it, and its chain some 0.02 µs a KiB (estimated, not measured), which is what a
single block waits for at least; with several CTAs several blocks are under way.

A hash of independent chunks would have no chain, and would be another one than what lies on disks and in archives. It
is worth that only where a block's parts are in different processes.

Blocks are a multiple of 1 KiB; slots are one of 4 KiB. Addresses and the place for the checksums travel as the kernel's
parameter, as in `kernel`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.copying.cuda_driver import CudaDriver
from kvstore.errors import KvstoreError, MissingExtra

__all__ = ["KIB", "MAX_SUMS", "SOURCE", "SumKernel", "SumShape", "argument_of", "defines_of"]

U64 = NDArray[np.uint64]

KIB = 1024
"""Blocks are a multiple of it."""
MAX_SUMS = 4090
"""Of one launch: 8 bytes each, within a parameter of 32,764 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumShape:
    """What the kernel takes of the device."""

    ctas: int = 8
    """Most SMs that are taken from the engine. One sums some 40 GB/s up (estimated, not measured)."""
    summers: int = 7
    """Warps of each that sum up; one more chains."""

    @property
    def cta_threads(self) -> int:
        """Threads of one CTA."""
        return 32 * (1 + self.summers)


class SumKernel:
    """The compiled kernel. One thread at a time."""

    def __init__(self, driver: CudaDriver, shape: SumShape) -> None:
        """Compiles, about 0.3 s the first time on a machine. Raises: MissingExtra, KvstoreError."""
        self._driver = driver
        self._shape = shape
        self._kernel = _compiled(driver.device_index, shape)

    def launch(self, addresses: U64, nbytes: int, sums_at: int, stream: int) -> None:
        """Checksums of the blocks at these addresses [n], at most MAX_SUMS, as u64[n][2] to memory that kernels see.

        `nbytes` of each: a multiple of KIB. Addresses are aligned to 16 bytes.
        """
        self._driver.launch(
            self._kernel.kernel.ptr,
            ctas=min(self._shape.ctas, len(addresses)),
            threads=self._shape.cta_threads,
            shared_bytes=0,
            stream=stream,
            argument=argument_of(addresses, nbytes, sums_at),
        )


def argument_of(addresses: U64, nbytes: int, sums_at: int) -> bytes:
    """`Work` of the source below."""
    blocks: U64 = np.zeros(MAX_SUMS, dtype=np.uint64)
    blocks[: len(addresses)] = addresses
    return blocks.tobytes() + struct.pack("<QQQ", nbytes, len(addresses), sums_at)


def defines_of(shape: SumShape) -> tuple[str, ...]:
    """What the source is compiled with."""
    return f"-DMAX_SUMS={MAX_SUMS}", f"-DSUMMERS={shape.summers}"


def _compiled(device_index: int, shape: SumShape) -> Any:
    """The kernel as cupy compiles it for a device, or finds it compiled. Raises: as SumKernel."""
    try:
        import cupy
    except ImportError:
        raise MissingExtra("checksums on a GPU need cupy: pip install 'kvstore[cuda]'") from None
    with cupy.cuda.Device(device_index):
        try:
            module = cupy.RawModule(code=SOURCE, options=("-std=c++17", *defines_of(shape)), backend="nvrtc")
            kernel = module.get_function("sum_blocks")
            assert kernel.kernel.ptr, "loaded by asking"
        except (cupy.cuda.compiler.CompileException, cupy.cuda.driver.CUDADriverError) as error:
            raise KvstoreError(
                f"the checksum kernel does not compile: {str(error).strip().partition(chr(10))[0]}"
            ) from None
    return kernel


_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _words(offset: int, count: int) -> str:
    """So many words of the secret, from a byte on, for C."""
    return ", ".join(f"0x{word:016x}ull" for word in struct.unpack_from(f"<{count}Q", _SECRET, offset))


SOURCE = (
    r"""
typedef unsigned long long u64;
struct Work { u64 blocks[MAX_SUMS]; u64 nbytes; u64 count; u64* sums; };
struct __align__(16) Pair { u64 even, odd; };

"""
    f"__constant__ u64 KEYS[24] = {{ {_words(0, 24)} }};\n"
    f"__constant__ u64 LAST[8] = {{ {_words(121, 8)} }};  // of the last 64 bytes\n"
    f"__constant__ u64 LOW[8] = {{ {_words(11, 8)} }};\n"
    f"__constant__ u64 HIGH[8] = {{ {_words(117, 8)} }};\n"
    r"""
__constant__ u64 START[8] = {
    0xC2B2AE3Dull, 0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
    0x85EBCA77C2B2AE63ull, 0x85EBCA77ull, 0x27D4EB2F165667C5ull, 0x9E3779B1ull,
};
enum { KIB = 1024, TILE = 64, SCRAMBLE = 16, AT_ONCE = 4 };

__device__ __forceinline__ u64 product(u64 key)
{
    return (key & 0xFFFFFFFFull) * (key >> 32);
}

// The lanes `2 * pair` and `2 * pair + 1` of one stripe: each gets its own product, and the other's value.
__device__ __forceinline__ void add(u64& even, u64& odd, Pair value, Pair keys)
{
    even += value.odd + product(value.even ^ keys.even);
    odd += value.even + product(value.odd ^ keys.odd);
}

__device__ __forceinline__ u64 fold(u64 a, u64 b)
{
    return (a * b) ^ __umul64hi(a, b);
}

__device__ __forceinline__ u64 merge(u64 mine, u64 other, unsigned lane, const u64* keys, u64 start)
{
    u64 sum = fold(mine ^ keys[lane], other ^ keys[lane ^ 1]);  // alike in both lanes of a pair
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 4);
    u64 h = start + sum;
    h ^= h >> 37;
    h *= 0x165667919E3779F9ull;
    return h ^ h >> 32;
}

// A warp: the sums of `count` KiB from `data` on, of every SUMMERS-th from `first` on. A thread has 16 bytes of every
// eighth stripe, `front` and `back` its keys in the two halves of a KiB, `end` those in the second half of the block's
// last KiB, which is number `last` from here.
__device__ __forceinline__ void sum_tile(const unsigned char* data, unsigned count, unsigned first, u64 last,
                                         Pair front, Pair back, Pair end, u64 (*sums)[8])
{
    const unsigned thread = threadIdx.x % 32;
    for (unsigned base = first; base < count; base += AT_ONCE * SUMMERS) {
        Pair held[AT_ONCE][2];
        #pragma unroll
        for (unsigned i = 0; i < AT_ONCE; ++i) {
            const unsigned at = base + i * SUMMERS;
            if (at < count) {
                const Pair* from = reinterpret_cast<const Pair*>(data + (u64)at * KIB) + thread;
                held[i][0] = from[0];
                held[i][1] = from[32];
            }
        }
        #pragma unroll
        for (unsigned i = 0; i < AT_ONCE; ++i) {
            const unsigned at = base + i * SUMMERS;
            if (at >= count) break;
            u64 even = 0, odd = 0;
            add(even, odd, held[i][0], front);
            add(even, odd, held[i][1], { at == last ? end.even : back.even, at == last ? end.odd : back.odd });
            #pragma unroll
            for (unsigned distance = 4; distance < 32; distance *= 2) {
                even += __shfl_xor_sync(0xFFFFFFFFu, even, distance);
                odd += __shfl_xor_sync(0xFFFFFFFFu, odd, distance);
            }
            if (thread < 4) {
                sums[at][2 * thread] = even;
                sums[at][2 * thread + 1] = odd;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * (1 + SUMMERS)) sum_blocks(const __grid_constant__ Work work)
{
    __shared__ u64 sums[2][TILE][8];
    const unsigned warp = threadIdx.x / 32, thread = threadIdx.x % 32, stripe = thread / 4, pair = thread % 4;
    const unsigned lane = thread % 8;  // the first warp has each lane four times
    const u64 scramble = KEYS[SCRAMBLE + lane];
    const unsigned key = stripe + 2 * pair;
    const Pair front = { KEYS[key], KEYS[key + 1] }, back = { KEYS[key + 8], KEYS[key + 9] };
    const Pair end = stripe == 7 ? Pair{ LAST[2 * pair], LAST[2 * pair + 1] } : back;
    const u64 kibs = work.nbytes / KIB, tiles = (kibs + TILE - 1) / TILE;
    for (u64 block = blockIdx.x; block < work.count; block += gridDim.x) {
        const unsigned char* data = reinterpret_cast<const unsigned char*>(work.blocks[block]);
        u64 state = START[lane];
        for (u64 tile = 0; tile <= tiles; ++tile) {
            if (warp && tile < tiles) {
                const u64 done = tile * TILE, left = kibs - done;
                sum_tile(data + done * KIB, unsigned(left < TILE ? left : TILE), warp - 1, left - 1, front, back,
                         end, sums[tile % 2]);
            }
            if (!warp && tile) {
                const u64 done = (tile - 1) * TILE, left = kibs - done;
                const u64 (*from)[8] = sums[(tile - 1) % 2];
                const unsigned scrambled = unsigned(left > TILE ? TILE : left - 1);  // the last KiB is not
                #pragma unroll 8
                for (unsigned at = 0; at < scrambled; ++at) {
                    state += from[at][lane];
                    state = (state ^ state >> 47 ^ scramble) * 0x9E3779B1ull;
                }
                if (left <= TILE) state += from[left - 1][lane];
            }
            __syncthreads();
        }
        if (!warp) {
            const u64 other = __shfl_xor_sync(0xFFFFFFFFu, state, 1);
            const u64 low = merge(state, other, lane, LOW, work.nbytes * 0x9E3779B185EBCA87ull);
            const u64 high = merge(state, other, lane, HIGH, ~(work.nbytes * 0xC2B2AE3D27D4EB4Full));
            if (!thread) {
                work.sums[2 * block] = low;
                work.sums[2 * block + 1] = high;
            }
        }
    }
    __threadfence_system();
}
"""
)
