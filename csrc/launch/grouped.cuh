// The kernels of integer products for several tokens of one activation dtype, chosen by what a bank
// is.
#pragma once
#include "../device/grouped.cuh"
#include "kernels.h"

namespace qpn {
namespace grouped {

template <class Act, class F, bool kIsFirst>
__global__ void __launch_bounds__(kPairThreads, 1) kernel(const __grid_constant__ Step step) {
#if QPN_ARCH >= 800
    of_segments<Act, F, kIsFirst>(step);
#endif
}

template <class Act, class F>
Kernel of(Part part) {
    return {
        part == kFirst ? kernel<Act, F, true> : kernel<Act, F, false>, kPairWarps, 1,
        [](const Bank& bank, int64_t experts, int64_t rows) {
            return int64_t(
                GroupedLayout(bank.chunks(), experts, rows, F::S::kBytes, F::Sums::kNote).bytes);
        }};
}

template <class Act, int kLayout>
Kernel pick_layout(Part part, const Bank& bank) {
    return in_one_group(bank, kChunkBlocks) ? of<Act, DigitRows<kLayout, true>>(part)
                                            : of<Act, DigitRows<kLayout, false>>(part);
}

template <class Act>
Kernel pick(Part part, const Bank& bank) {
    if (bank.kind != kInt4 || !in_one_group(bank, 1)) return {};
    if (bank.layout == kWide) return pick_layout<Act, kWide>(part, bank);
    if (bank.layout == kRecord) return pick_layout<Act, kRecord>(part, bank);
    return pick_layout<Act, kCompact>(part, bank);
}

}  // namespace grouped
}  // namespace qpn
