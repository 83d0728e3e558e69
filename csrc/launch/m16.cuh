// Kernels of the m16n8k16 family for several tokens of one activation dtype, chosen by what a bank
// is.
#pragma once
#include "../device/decode.cuh"
#include "kernels.h"

namespace qpn {
namespace m16 {

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
Kernel of_pass(Part part) {
    return {part == kFirst ? passes_kernel<F, kWarps, kAhead, true>
                           : passes_kernel<F, kWarps, kAhead, false>,
            kWarps, 2, [](const Bank&, int64_t experts, int64_t rows) {
                const int32_t ring = kWarps * kAhead * F::S::kBytes;
                return int64_t(PassLayout(kWarps, experts, rows, ring).bytes);
            }};
}
template <class F>
Kernel shaped_pass(Part part) {
    return of_pass<F, 8, 3>(part);
}

template <class Act, int kKind, int kLayout, bool kFused>
Kernel pick_layout(Part part, const Bank& bank) {
    if constexpr (kFused || kKind == kE2m1) {
        return shaped_pass<Rows<Act, kKind, kLayout, 0, kFused>>(part);
    } else {
        if (in_one_group(bank, kChunkBlocks))
            return shaped_pass<Rows<Act, kKind, kLayout, kChunkBlocks, false>>(part);
        return in_one_group(bank, 1) ? shaped_pass<Rows<Act, kKind, kLayout, 1, false>>(part)
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
    if (part == kSum) return {sum_kernel<Act>, 2, 0, nullptr};
    if (bank.kind == kE2m1)
        return bank.layout == kWide ? pick_layout<Act, kE2m1, kWide, false>(part, bank)
                                    : pick_layout<Act, kE2m1, kCompact, false>(part, bank);
    return fused ? pick_int4<Act, true>(part, bank) : pick_int4<Act, false>(part, bank);
}

}  // namespace m16
}  // namespace qpn
