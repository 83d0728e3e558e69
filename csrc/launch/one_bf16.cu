#include "one.cuh"

namespace qpn {
OneKernel one_bf16(const Bank& bank, bool first) { return one::pick<Bf16>(bank, first); }
}  // namespace qpn
