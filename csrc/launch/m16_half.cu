#include "m16.cuh"

namespace qpn {
Kernel m16_half(Part part, const Bank& bank, bool fused) {
    return m16::pick<Half>(part, bank, fused);
}
}  // namespace qpn
