// The family of SM70 and SM75: weights are the A operand of m8n8k4, activations are B, fp16 alone.
//
// Each lane holds one column (a row of A) and eight consecutive K: one word feeds two products. The
// eight lanes of a quadpair hold eight columns; B is the same for all four quadpairs, lane l giving
// row l % 4 + 4 (l / 16) of the pass. Sums of (q - z) over one group are scaled in fp32.
#pragma once
#include "access.cuh"
#include "closing.cuh"
#include "codes.cuh"
#include "mma.cuh"

namespace qpn {

struct QuadLane {
    int32_t lane, token,
        column;  // column: first of the two that its sums belong to, the other is 2 on
    QPN_DEVICE explicit QuadLane(int32_t number)
        : lane(number),
          token(number % 4 + number / 16 * 4),
          column((number & 16) + (number / 4 % 4) * 4 + (number & 1)) {}
};

// Scale and zero point, or fp16 scale and bias, of one column in one group.
struct ColumnScale {
    float scale;
    uint32_t first, second;  // fused: scale and bias doubled; else 1024 + z doubled, and nothing
};

template <bool kFused>
QPN_DEVICE ColumnScale column_scale(const Bank& bank, int64_t slot, int32_t group, int32_t column) {
    const int64_t at = (slot * bank.groups + group) * bank.np() + column;
    ColumnScale out{1.0f, 0, 0};
    uint32_t bits = 0, bias = 0;
    float zero = 0.0f;
    if (bank.kind == kE2m1) {
        if (bank.layout == kWide) {
            out.scale = half_to_float(reinterpret_cast<const uint16_t*>(bank.plane)[at]);
        } else {
            uint32_t low, high;
            e4m3_to_half2(bank.plane[at], low, high);
            out.scale = half_to_float(low);
        }
        return out;
    }
    if (bank.layout == kCompact) {
        bits = reinterpret_cast<const uint16_t*>(bank.plane)[at];
        out.scale = bank.scale_dtype == kBf16 ? bf16_to_float(bits) : half_to_float(bits);
        zero = float(bank.second[at / 2] >> (column % 2 * 4) & 0xf);
    } else if (bank.layout == kRecord) {
        out.scale = half_to_float(bank.plane[at * 3] | uint32_t(bank.plane[at * 3 + 1]) << 8);
        zero = float(bank.plane[at * 3 + 2]);
    } else {
        bits = reinterpret_cast<const uint32_t*>(bank.plane)[at];
        bias = bits >> 16;
        out.scale = half_to_float(bits & 0xffffu);
        if (!kFused)
            zero = out.scale == 0.0f ? 0.0f : rintf(__fdividef(-half_to_float(bias), out.scale));
    }
    if constexpr (kFused) {
        const uint32_t scale = float_to_half(out.scale);
        if (bank.layout != kWide) bias = float_to_half((0.0f - zero) * out.scale);
        out.first = scale | scale << 16;
        out.second = bias | bias << 16;
        out.scale = 1.0f;
    } else {
        const uint32_t offset = float_to_half(1024.0f + zero);
        out.first = offset | offset << 16;
    }
    return out;
}

template <bool kE2, bool kFused>
QPN_DEVICE void quad_pairs(uint32_t w, const ColumnScale& of, uint32_t (&p)[4]) {
    if constexpr (kE2) {
        Codes<Half, kE2m1>::pairs(w, p);
    } else if constexpr (kFused) {
        fused_pairs(w, of.first, of.second, p);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p[i] = half2_sub((w >> (4 * i) & 0x000f000fu) | 0x64006400u, of.first);
    }
}

// One chunk of 128 rows of one tile: adds to `total`, whose entry i is column + (i & 2) and token
// (i & 4) + (lane & 2) + (i & 1).
template <bool kE2, bool kFused>
QPN_DEVICE void quad_chunk(float (&total)[8], const Bank& bank, int32_t slot, int32_t tile,
                           int32_t chunk, const uint16_t* x, const QuadLane& lane) {
    constexpr int kWords = kChunkRows / kRowsPerWord;
    const uint32_t* from =
        bank.words + bank.tile_at(slot, tile) + int64_t(chunk) * (kWords * kTile) + lane.lane;
    const int32_t there = min(bank.blocks * (kBlockRows / kRowsPerWord) - chunk * kWords, kWords);
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = i < there ? load_word(from + i * kTile) : 0;
    float sum[8] = {};
    int32_t group = bank.group_of(chunk * (kWords / 2));
    ColumnScale of = column_scale<kFused>(bank, slot, group, tile * kTile + lane.lane);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        const int32_t at = (chunk * kWords + i) * kRowsPerWord;
        Vector b{0, 0, 0, 0};
        if (x != nullptr && at < bank.k) b = load_activations(x + at);
        uint32_t p[4];
        quad_pairs<kE2, kFused>(words[i], of, p);
        mma_8x8x4(sum, p[0], p[1], b.x, b.y);
        mma_8x8x4(sum, p[2], p[3], b.z, b.w);
        if (i % 2 == 0) continue;
        const int32_t next =
            i + 1 < kWords ? bank.group_of(chunk * (kWords / 2) + (i + 1) / 2) : -1;
        if (next == group) continue;
        const float scale = kE2 ? of.scale * Codes<Half, kE2m1>::kBack : of.scale;
        const float low = __shfl_sync(0xffffffffu, scale, lane.column);
        const float high = __shfl_sync(0xffffffffu, scale, lane.column + 2);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            total[c] = fmaf(c & 2 ? high : low, sum[c], total[c]);
            sum[c] = 0.0f;
        }
        group = next;
        if (next >= 0) of = column_scale<kFused>(bank, slot, group, tile * kTile + lane.lane);
    }
}

// Passes of W13 or W2; all warps of a block split the K of one tile.
template <bool kE2, bool kFused, int kWarps, bool kFirst>
QPN_DEVICE void quad_passes(const Step& step) {
    extern __shared__ uint4 shared[];
    const Bank& bank = kFirst ? step.w13 : step.w2;
    const QuadLane lane(threadIdx.x % 32);
    const int32_t warp = threadIdx.x / 32;
    const PassLayout at(kWarps, step.w13.experts, step.tokens * step.top_k, 0);
    if (kFirst) wait_for_launch_before();
    let_next_launch_start();
    Routing routing(reinterpret_cast<int32_t*>(shared) + at.routing / 4, step.w13.experts,
                    step.tokens * step.top_k);
    compact_rows(routing, step, whole_block());
    if (!kFirst) wait_for_launch_before();
    const int64_t tasks = int64_t(*routing.passes) * bank.tiles;
    const int32_t begin = int32_t(tasks * blockIdx.x / gridDim.x),
                  end = int32_t(tasks * (blockIdx.x + 1) / gridDim.x);
    for (int32_t task = begin; task < end; ++task) {
        const int32_t pass = task / bank.tiles, tile = task % bank.tiles;
        const uint16_t* x = input_of<kFirst>(step, routing, pass, lane.token);
        float total[8] = {};
        for (int32_t chunk = warp; chunk < bank.chunks(); chunk += kWarps)
            quad_chunk<kE2, kFused>(total, bank, routing.pass_slot[pass], tile, chunk, x, lane);
        float* part = reinterpret_cast<float*>(shared) + (task & 1) * (kWarps * kPassRows * kPitch);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            part[(warp * kPassRows + (i & 4) + (lane.lane & 2) + (i & 1)) * kPitch + lane.column +
                 (i & 2)] = total[i];
        __syncthreads();
        add_up<Half, kFirst>(step, routing, pass, tile, 1, kWarps, shared_address(part), kWarps);
    }
}

}  // namespace qpn
