// AWQ with `fused_bias`: every weight is rounded to fp16 by itself, so products stay in fp32.
#pragma once
#include "groups_impl.h"

namespace qpn {
namespace {

// fp16_fma(q, s, fp16(-z * s)) of eight rows of a vector: the fp32 sum is exact, so it rounds once.
struct FusedBias {
    Floats scale, bias;
    FusedBias(const Group& group, int at)
        : scale(load<Floats>(group.scale + at)),
          bias(rounded_to_half((all(0.0f) - to_floats(load<Ints>(group.zero + at))) * scale)) {}
    Floats operator()(Words word, int row) const {
        const Ints code = (Ints)(word >> (4 * kNibbleOfRow[row]) & 0xfu);
        return rounded_to_half(fma(to_floats(code), scale, bias));
    }
};

template <int R>
void run_fused_rows(const TileCall& call) {
    const Bank& bank = *call.bank;
    const uint32_t* words = tile_of(bank, call.slot, call.tile);
    const int64_t entry = call.slot * bank.plane() + call.tile * kTile;
    Floats total[kVectors][R] = {};
    for (int64_t g = 0; g < bank.groups(); ++g) {
        Group group;
        read_group(bank, entry + g * bank.n_padded(), group);
        int64_t first, last;
        span(bank, g, first, last);
        for (int v = 0; v < kVectors; ++v) {
            const FusedBias weight(group, v * kColumns);
            for (int64_t k8 = first; k8 < last; ++k8) {
                const Words word = load<Words>(words + k8 * kTile + v * kColumns);
#pragma GCC unroll 8
                for (int row = 0; row < kRowsPerWord; ++row) {
                    const Floats w = weight(word, row);
                    for (int r = 0; r < R; ++r)
                        total[v][r] = fma(w, all(call.row[r].x[k8 * kRowsPerWord + row]), total[v][r]);
                }
            }
        }
    }
    for (int v = 0; v < kVectors; ++v)
        for (int r = 0; r < R; ++r) store(call.y[r] + v * kColumns, total[v][r]);
}

void run_fused(const TileCall& call) {
    switch (call.rows) {
        case 1: return run_fused_rows<1>(call);
        case 2: return run_fused_rows<2>(call);
        case 3: return run_fused_rows<3>(call);
        case 4: return run_fused_rows<4>(call);
        case 5: return run_fused_rows<5>(call);
        case 6: return run_fused_rows<6>(call);
        case 7: return run_fused_rows<7>(call);
        default: return run_fused_rows<kMostRows>(call);
    }
}

}  // namespace
}  // namespace qpn
