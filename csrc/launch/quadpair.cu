// Kernels of the quadpair family: fp16, any bank.
#include "../device/quadpair.cuh"
#include "kernels.h"

namespace qpn {
namespace {

constexpr int kWarps = 8;

template <bool kE2, bool kFused, bool kIsFirst>
__global__ void __launch_bounds__(kWarps * 32, 2) quad_kernel(const __grid_constant__ Step step) {
    quad_passes<kE2, kFused, kWarps, kIsFirst>(step);
}
__global__ void __launch_bounds__(64) quad_sum_kernel(const __grid_constant__ Step step) {
    sum_rows<Half>(step);
}

int64_t shared_bytes(const Bank&, int64_t experts, int64_t rows) {
    return PassLayout(kWarps, experts, rows, 0).bytes;
}

template <bool kE2, bool kFused>
Kernel quad(Part part) {
    return {part == kFirst ? quad_kernel<kE2, kFused, true> : quad_kernel<kE2, kFused, false>,
            kWarps, 2, shared_bytes};
}

}  // namespace

Kernel quadpair_half(Part part, const Bank& bank, bool fused) {
    if (part == kSum) return {quad_sum_kernel, 2, 0, nullptr};
    if (bank.kind == kE2m1) return quad<true, false>(part);
    return fused ? quad<false, true>(part) : quad<false, false>(part);
}

}  // namespace qpn
