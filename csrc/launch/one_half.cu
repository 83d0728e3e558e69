#include "one.cuh"

namespace qpn {
OneKernel one_half(const Bank& bank, bool first) { return one::pick<Half>(bank, first); }
}  // namespace qpn
