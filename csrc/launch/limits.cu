// How many rows one step can have: each block of a step compacts all of them in its shared memory.
#include "../device/closing.cuh"
#include "kernels.h"
#include "shared.h"

namespace qpn {
namespace {

int64_t most_of(const Kernel& kernel, int64_t experts, int64_t block_bytes) {
    const PassLayout none(kernel.warps, 0, 0, kernel.ring_bytes);
    // The layout rounds up to 16 bytes.
    const int64_t ints = (block_bytes - kSystemSharedBytes - none.bytes - 16) / 4 - experts;
    return ints / (Routing::ints(0, 1) - Routing::ints(0, 0));
}

}  // namespace

int64_t moe_most_rows(const Step& step, bool fused, int64_t dtype, int64_t family,
                      int64_t block_bytes) {
    int64_t most = kMostRows;
    for (const Part part : {kFirst, kSecond}) {
        const Bank& bank = part == kFirst ? step.w13 : step.w2;
        const Kernel kernel = family == kQuadpair  ? quadpair_half(part, bank, fused)
                              : dtype == kBfloat16 ? m16_bf16(part, bank, fused)
                                                   : m16_half(part, bank, fused);
        const int64_t own = most_of(kernel, step.w13.experts, block_bytes);
        most = own < most ? own : most;
    }
    return most < 0 ? 0 : most;
}

}  // namespace qpn
