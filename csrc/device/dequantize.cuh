// Weights of one expert, for `legacy`: tiles of a bank as fp32 or bf16 (columns, K) row-major, in
// the order of DESIGN section 5.
#pragma once
#include "metadata.cuh"
#include "quadpair.cuh"

namespace qpn {

struct Dequantize {
    Bank bank;
    void* out;
    int32_t slot, first_tile, last_tile, bf16, fused;
};

// A warp takes one tile of columns and 32 rows: lane = column, so that reads are whole lines.
QPN_DEVICE void dequantize_tiles(const Dequantize& call) {
    const Bank& bank = call.bank;
    const int32_t lane = threadIdx.x % 32,
                  block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int32_t tile = call.first_tile + blockIdx.y, column = tile * kTile + lane;
    if (block >= bank.blocks || column >= bank.n) return;
    const uint32_t* from = bank.words + bank.tile_at(call.slot, tile) + block * (4 * kTile) + lane;
    const int64_t row = int64_t(column - call.first_tile * kTile) * bank.k;
    for (int32_t i = 0; i < 4; ++i) {
        const int32_t k = block * kBlockRows + i * kRowsPerWord;
        if (k >= bank.k) return;
        const int32_t group = bank.group_of(block * 2 + i / 2);
        const uint32_t w = load_word(from + i * kTile);
        float values[8];
        uint32_t p[4];
        const bool fused = call.fused != 0;
        const ColumnScale of = fused ? column_scale<true>(bank, call.slot, group, column)
                                     : column_scale<false>(bank, call.slot, group, column);
        if (bank.kind == kE2m1)
            quad_pairs<true, false>(w, of, p);
        else if (fused)
            quad_pairs<false, true>(w, of, p);
        else
            quad_pairs<false, false>(w, of, p);
        const float back = bank.kind == kE2m1 ? Codes<Half, kE2m1>::kBack : 1.0f;
        const float scale =
            bank.kind == kE2m1 ? apply_global(bank, call.slot, column, of.scale) : of.scale;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float code = half_to_float(j % 2 ? p[j / 2] >> 16 : p[j / 2]) * back;
            // -0 from (q - z) * 0 would tell layouts apart.
            values[j] = bank.kind == kInt4 && scale == 0.0f ? 0.0f : code * scale;
        }
        if (call.bf16) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                pairs[j] = float_to_bf16(values[2 * j]) | float_to_bf16(values[2 * j + 1]) << 16;
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(call.out) + row + k) =
                make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
            float* to = static_cast<float*>(call.out) + row + k;
            *reinterpret_cast<float4*>(to) =
                make_float4(values[0], values[1], values[2], values[3]);
            *reinterpret_cast<float4*>(to + 4) =
                make_float4(values[4], values[5], values[6], values[7]);
        }
    }
}

}  // namespace qpn
