// Launches the kernel of `legacy`.
#include "../device/dequantize.cuh"
#include "moe.h"

namespace qpn {
namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(kWarps * 32)
    dequantize_kernel(const __grid_constant__ Dequantize call) {
    dequantize_tiles(call);
}

}  // namespace

cudaError_t dequantize(const Dequantize& call, cudaStream_t stream) {
    const dim3 grid(unsigned((call.bank.blocks + kWarps - 1) / kWarps),
                    unsigned(call.last_tile - call.first_tile));
    dequantize_kernel<<<grid, kWarps * 32, 0, stream>>>(call);
    return cudaGetLastError();
}

}  // namespace qpn
