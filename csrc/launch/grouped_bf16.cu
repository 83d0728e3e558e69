#include "grouped.cuh"

namespace qpn {
Kernel grouped_bf16(Part part, const Bank& bank) { return grouped::pick<Bf16>(part, bank); }
}  // namespace qpn
