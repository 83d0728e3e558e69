// Launches the kernel that unpacks weights for `legacy`.
#include "../device/dequantize.cuh"
#include "legacy.h"

namespace qpn {
namespace {

constexpr int64_t kMostExperts = 65535;                  // blocks across a grid
constexpr int64_t kSharedBlocks = 4 * kDequantizeWarps;  // least that warps share out

template <int kOut, int kMaking>
__global__ void __launch_bounds__(kDequantizeWarps * 32)
    dequantize_kernel(const __grid_constant__ Dequantize call) {
    dequantize_tiles<kOut, kMaking>(call);
}

template <int kOut>
void launch(int making, dim3 grid, const Dequantize& call, cudaStream_t stream) {
    constexpr int kThreads = kDequantizeWarps * 32;
    if (making == kExact)
        dequantize_kernel<kOut, kExact><<<grid, kThreads, 0, stream>>>(call);
    else if (making == kFused)
        dequantize_kernel<kOut, kFused><<<grid, kThreads, 0, stream>>>(call);
    else
        dequantize_kernel<kOut, kFloat4><<<grid, kThreads, 0, stream>>>(call);
}

}  // namespace

const char* dequantize(const Bank& bank, bool fused, const LegacyWeights& weights,
                       cudaStream_t stream, cudaError_t& status) {
    const int making = bank.kind == kE2m1 ? kFloat4 : fused ? kFused : kExact;
    if (weights.dtype < kFloat16 || weights.dtype > kFloat32)
        return "weights are made fp16, bf16 or fp32";
    if (weights.count < 1 || weights.count > kMostExperts || weights.first_tile < 0 ||
        weights.first_tile >= weights.last_tile || weights.last_tile > bank.tiles)
        return "there are no such experts or tiles";
    const int64_t first = weights.first_tile * kTile, last = weights.last_tile * kTile;
    const int64_t columns = (last < bank.n ? last : bank.n) - first;
    const int64_t numbers =
        weights.count * columns * bank.k * dequantized_parts(making, int(weights.dtype));
    if (!weights.out.holds(numbers * (weights.dtype == kFloat32 ? 4 : 2)) ||
        !weights.factors.holds(weights.count * bank.n * 4) ||
        !weights.ranked.holds(weights.count * 8) || !weights.counts.holds(weights.count * 4))
        return "the room for weights is too small";
    if (reinterpret_cast<uintptr_t>(weights.out.at) % 16)
        return "the room for weights is off its boundary of 16 bytes";
    Dequantize call{};
    call.bank = bank;
    call.out = weights.out.at;
    call.factors = static_cast<float*>(weights.factors.at);
    call.slots = static_cast<const int64_t*>(weights.ranked.at);
    call.counts = static_cast<const int32_t*>(weights.counts.at);
    call.first_tile = int32_t(weights.first_tile);
    call.last_tile = int32_t(weights.last_tile);
    call.sharing = bank.blocks >= kSharedBlocks ? kDequantizeWarps : 1;
    const int64_t tiles = weights.last_tile - weights.first_tile;
    const int64_t across =
        call.sharing > 1 ? tiles : (tiles + kDequantizeWarps - 1) / kDequantizeWarps;
    const dim3 grid{unsigned(across), unsigned(weights.count)};
    if (weights.dtype == kFloat16)
        launch<kFloat16>(making, grid, call, stream);
    else if (weights.dtype == kBfloat16)
        launch<kBfloat16>(making, grid, call, stream);
    else
        launch<kFloat32>(making, grid, call, stream);
    status = cudaGetLastError();
    return nullptr;
}

}  // namespace qpn
