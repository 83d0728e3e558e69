#include "m16.cuh"

namespace qpn {
Kernel m16_bf16(Part part, const Bank& bank, bool fused) {
    return m16::pick<Bf16>(part, bank, fused);
}
}  // namespace qpn
