// Kernels of the m16n8k16 family for one activation dtype, chosen by what a bank is.
#pragma once
#include "../device/decode.cuh"
#include "kernels.h"

namespace qpn {
namespace m16 {

template <class F, int kWarps, int kAhead>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 16 ? 2 : 1)
    first_of_one_kernel(const __grid_constant__ Step step) {
#if QPN_ARCH >= 800
    first_of_one<F, kWarps, kAhead>(step);
#endif
}
template <class F, int kWarps, int kAhead>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 16 ? 2 : 1)
    second_of_one_kernel(const __grid_constant__ Step step) {
#if QPN_ARCH >= 800
    second_of_one<F, kWarps, kAhead>(step);
#endif
}
// Two blocks a processor, but for metadata so wide that the registers do not suffice.
template <class F>
constexpr int kPassBlocks = F::S::kBytes < 3072 ? 2 : 1;

template <class F, int kWarps, int kAhead, bool kIsFirst>
__global__ void __launch_bounds__(kWarps * 32, kPassBlocks<F>)
    passes_kernel(const __grid_constant__ Step step) {
#if QPN_ARCH >= 800
    of_passes<F, kWarps, kAhead, kIsFirst>(step);
#endif
}
template <class Act>
__global__ void __launch_bounds__(256) sum_kernel(const __grid_constant__ Step step) {
    sum_rows<Act>(step);
}

template <class F, int kWarps, int kAhead>
Kernel of_one(Part part) {
    return {part == kFirstOfOne ? first_of_one_kernel<F, kWarps, kAhead>
                                : second_of_one_kernel<F, kWarps, kAhead>,
            kWarps, kWarps * kAhead * F::S::kBytes};
}
template <class F, int kWarps, int kAhead>
Kernel of_pass(Part part) {
    return {part == kFirst ? passes_kernel<F, kWarps, kAhead, true>
                           : passes_kernel<F, kWarps, kAhead, false>,
            kWarps, kWarps * kAhead * F::S::kBytes};
}
// What decodes most runs sixteen warps a block, two blocks a processor; the rest needs more
// registers.
template <class F, bool kUsual>
Kernel shaped_one(Part part) {
    if constexpr (kUsual)
        return of_one<F, 16, 2>(part);
    else
        return of_one<F, 8, 2>(part);
}
template <class F>
Kernel shaped_pass(Part part) {
    return of_pass<F, 8, 3>(part);
}

template <class Act, int kKind, int kLayout, bool kFused>
Kernel pick_layout(Part part, const Bank& bank) {
    // Blocks of 32 rows that lie in one group for sure.
    const auto aligned = [&](int blocks) {
        return bank.groups == 1 ||
               (bank.group_segments % (2 * blocks) == 0 && bank.phase_segments % (2 * blocks) == 0);
    };
    const bool one = part == kFirstOfOne || part == kSecondOfOne;
    if constexpr (kFused) {
        return one ? shaped_one<Single<Act, kKind, kLayout, true, true>, false>(part)
                   : shaped_pass<Rows<Act, kKind, kLayout, 0, true>>(part);
    } else if constexpr (kKind == kE2m1) {
        return one ? shaped_one<Single<Act, kKind, kLayout, true, false>, true>(part)
                   : shaped_pass<Rows<Act, kKind, kLayout, 0, false>>(part);
    } else {
        if (one)
            return aligned(1)
                       ? shaped_one<Single<Act, kKind, kLayout, false, false>, kLayout == kCompact>(
                             part)
                       : shaped_one<Single<Act, kKind, kLayout, true, false>, false>(part);
        if (aligned(kChunkBlocks))
            return shaped_pass<Rows<Act, kKind, kLayout, kChunkBlocks, false>>(part);
        return aligned(1) ? shaped_pass<Rows<Act, kKind, kLayout, 1, false>>(part)
                          : shaped_pass<Rows<Act, kKind, kLayout, 0, false>>(part);
    }
}

template <class Act, bool kFused>
Kernel pick_int4(Part part, const Bank& bank) {
    if (bank.layout == kWide) return pick_layout<Act, kInt4, kWide, kFused>(part, bank);
    if (bank.layout == kRecord) return pick_layout<Act, kInt4, kRecord, kFused>(part, bank);
    return pick_layout<Act, kInt4, kCompact, kFused>(part, bank);
}

template <class Act>
Kernel pick(Part part, const Bank& bank, bool fused) {
    if (part == kSum) return {sum_kernel<Act>, 2, 0};
    if (bank.kind == kE2m1)
        return bank.layout == kWide ? pick_layout<Act, kE2m1, kWide, false>(part, bank)
                                    : pick_layout<Act, kE2m1, kCompact, false>(part, bank);
    return fused ? pick_int4<Act, true>(part, bank) : pick_int4<Act, false>(part, bank);
}

}  // namespace m16
}  // namespace qpn
