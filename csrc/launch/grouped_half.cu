#include "grouped.cuh"

namespace qpn {
Kernel grouped_half(Part part, const Bank& bank) { return grouped::pick<Half>(part, bank); }
}  // namespace qpn
