// CUDA's words for a kernel that is compiled for the host: a thread of the device is a thread of the process, a CTA
// comes after the other. Of a warp all threads shuffle together.
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;

static std::unique_ptr<std::barrier<>> cta;
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static unsigned long long said[1024];

static void __syncthreads() { cta->arrive_and_wait(); }
static void __threadfence_system() {}

static unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, unsigned distance)
{
    auto& warp = *warps[threadIdx.x / 32];
    said[threadIdx.x] = value;
    warp.arrive_and_wait();
    const unsigned long long other = said[threadIdx.x ^ distance];
    warp.arrive_and_wait();
    return other;
}

static unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

template <typename Kernel, typename Work> void run_on_host(Kernel kernel, const Work& work, unsigned ctas, unsigned threads)
{
    gridDim.x = ctas;
    cta = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    for (unsigned i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
    for (unsigned block = 0; block < ctas; ++block) {
        std::vector<std::thread> running;
        for (unsigned i = 0; i < threads; ++i)
            running.emplace_back([&, i] { threadIdx.x = i; blockIdx.x = block; kernel(work); });
        for (auto& thread : running) thread.join();
    }
}
