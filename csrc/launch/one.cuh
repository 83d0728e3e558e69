// The kernels of one token for one activation dtype, chosen by what a bank is.
#pragma once
#include "../device/one.cuh"
#include "kernels.h"

namespace qpn {
namespace one {

// Two blocks a processor: that of W2 comes while that of W13 is at work.
template <class F, bool kFirst>
__global__ void __launch_bounds__(kPairThreads, 2) kernel(const __grid_constant__ OneStep step) {
#if QPN_ARCH >= 800
    one_token<F, kOneAhead, kFirst>(step);
#endif
}

template <class F>
OneKernel of(bool first) {
    return {first ? kernel<F, true> : kernel<F, false>, F::kBytes};
}

template <class Act, int kLayout>
OneKernel pick_int4(const Bank& bank, bool first) {
    const bool straddles =
        bank.groups > 1 && (bank.group_segments % 2 != 0 || bank.phase_segments % 2 != 0);
    return straddles ? of<Single<Act, kInt4, kLayout, true>>(first)
                     : of<Single<Act, kInt4, kLayout, false>>(first);
}

template <class Act>
OneKernel pick(const Bank& bank, bool first) {
    if (bank.kind == kE2m1)
        return bank.layout == kWide ? of<Single<Act, kE2m1, kWide, true>>(first)
                                    : of<Single<Act, kE2m1, kCompact, true>>(first);
    if (bank.layout == kWide) return pick_int4<Act, kWide>(bank, first);
    if (bank.layout == kRecord) return pick_int4<Act, kRecord>(bank, first);
    return pick_int4<Act, kCompact>(bank, first);
}

}  // namespace one
}  // namespace qpn
