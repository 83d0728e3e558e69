// The constants and index maths of csrc/device/qpn.cuh, for tests/test_device_layout.py.
#include "../../csrc/device/qpn.cuh"

extern "C" {

int64_t qpn_constant(int which) {
    const int64_t values[] = {qpn::kTile, qpn::kRowsPerWord, qpn::kInt4, qpn::kE2m1, qpn::kPlain,
                              qpn::kCompact, qpn::kRecord, qpn::kWide, qpn::kAsIs, qpn::kF16,
                              qpn::kBf16, qpn::kU8, qpn::kNoGlobal, qpn::kMultiplier, qpn::kDivisor,
                              qpn::kHost, qpn::kQuadpair, qpn::kM16n8k16};
    return values[which];
}

int64_t qpn_nibble(int row) { return qpn::kNibbleOfRow[row]; }

// Groups, group of a row, words of a tile's start; -1 where the sizes are refused.
int64_t qpn_index(int what, int64_t k, int64_t n, int64_t group, int64_t phase, int64_t a, int64_t b) {
    qpn::Bank bank{};
    if (!qpn::shape_bank(bank, 1 << 10, k, n, group, phase, 1)) return -1;
    if (what == 0) return bank.groups;
    if (what == 1) return bank.group_of(int32_t(a / qpn::kSegmentRows));
    return bank.tile_at(a, b);
}
}
