// Which kernel serves a launch of several tokens, and how many rows one step can have.
#include "../device/closing.cuh"
#include "kernels.h"
#include "shared.h"

namespace qpn {

Kernel Choice::any(Part part, const Bank& bank) const {
    if (family == kQuadpair) return quadpair_half(part, bank, fused);
    return dtype == kBfloat16 ? m16_bf16(part, bank, fused) : m16_half(part, bank, fused);
}

Kernel Choice::fastest(Part part, const Bank& bank, int64_t experts, int64_t rows,
                       int64_t block_bytes) const {
    if (family == kM16n8k16 && !fused) {
        const Kernel kernel =
            dtype == kBfloat16 ? grouped_bf16(part, bank) : grouped_half(part, bank);
        if (kernel.run != nullptr &&
            kernel.shared_bytes(bank, experts, rows) <= block_bytes - kSystemSharedBytes)
            return kernel;
    }
    return any(part, bank);
}

// Each block of a step compacts all of its rows in shared memory.
int64_t moe_most_rows(const Step& step, const Choice& choice, int64_t block_bytes) {
    int64_t most = kMostRows;
    for (const Part part : {kFirst, kSecond}) {
        const Bank& bank = part == kFirst ? step.w13 : step.w2;
        const int64_t none = choice.any(part, bank).shared_bytes(bank, step.w13.experts, 0);
        // The layout rounds up to a line.
        const int64_t ints = (block_bytes - kSystemSharedBytes - none - kLine) / 4;
        const int64_t own = ints / (Routing::ints(0, 1) - Routing::ints(0, 0));
        most = own < most ? own : most;
    }
    return most < 0 ? 0 : most;
}

}  // namespace qpn
