// What follows the products, for every family: partial sums added up, SwiGLU, the weighted sum.
#pragma once
#include "access.cuh"
#include "metadata.cuh"
#include "routing.cuh"

namespace qpn {

constexpr int kLine = 128;  // bytes that the memory deals in

// Shared memory of the kernels for passes.
struct PassLayout {
    int32_t part, routing, ring, bytes;
    QPN_BOTH PassLayout(int32_t warps, int64_t slots, int64_t rows, int32_t ring_bytes) {
        part = 0;
        routing = 2 * warps * kPassRows * kPitch * 4;
        // Copies to the ring take longer where it begins within a line.
        ring = routing + int32_t((Routing::ints(slots, rows) * 4 + kLine - 1) / kLine * kLine);
        bytes = ring + ring_bytes;
    }
};

// silu(gate) * up of neighbours in a warp, rounded where docs/routes.md says; `column` is the
// bank's. Every lane takes part.
template <class Act>
QPN_DEVICE void give_hidden(const Step& step, int32_t row, int32_t slot, int32_t column,
                            float sum) {
    const float value = rounded<Act>(apply_global(step.w13, slot, column, sum));
    const float up = __shfl_xor_sync(0xffffffffu, value, 1);
    if (column % 2 == 0 && column < step.w13.n)
        step.hidden[int64_t(row) * step.hidden_pitch + column / 2] =
            uint16_t(Act::from_float(value / (1.0f + __expf(-value)) * up));
}

// The activations that a row of a pass starts from, or null where the pass has fewer rows.
template <bool kFirst>
QPN_DEVICE const uint16_t* input_of(const Step& step, const Routing& routing, int32_t pass,
                                    int32_t number) {
    const int32_t row = routing.row_of(pass, number);
    if (row < 0) return nullptr;
    return kFirst ? step.x + int64_t(row / step.top_k) * step.w13.k
                  : step.hidden + int64_t(row) * step.hidden_pitch;
}

// The sum of one row and column, on its way: W13 to `hidden`, W2 to `y`. Every lane takes part.
template <class Act, bool kFirst>
QPN_DEVICE void give(const Step& step, int32_t row, int32_t slot, int32_t column, float sum) {
    if (kFirst)
        give_hidden<Act>(step, row, slot, column, sum);
    else if (column < step.w2.n)
        step.y[int64_t(row) * step.w2.n + column] =
            uint16_t(Act::from_float(apply_global(step.w2, slot, column, sum)));
}

// Adds up what the warps of each tile have left at `part` (warps, kPassRows, kPitch) and gives it
// on. Where several warps share a tile, whole warps share out the rows; alone, a warp adds up its
// own.
template <class Act, bool kFirst>
QPN_DEVICE void add_up(const Step& step, const Routing& routing, int32_t pass, int32_t first_tile,
                       int32_t abreast, int32_t splits, uint32_t part, int32_t warps) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t rows = routing.pass_rows[pass] & 15, slot = routing.pass_slot[pass];
    const int32_t first = splits > 1 ? warp : warp * rows,
                  last = splits > 1 ? abreast * rows : first + rows;
    for (int32_t i = first; i < last; i += splits > 1 ? warps : 1) {
        const int32_t beside = i / rows, number = i % rows;
        const int32_t column = (first_tile + beside) * kTile + lane;
        uint32_t from = part + ((beside * splits * kPassRows + number) * kPitch + lane) * 4;
        float sum = 0.0f;
        for (int32_t s = 0; s < splits; ++s, from += kPassRows * kPitch * 4)
            sum += read_float(from);
        give<Act, kFirst>(step, routing.row_of(pass, number), slot, column, sum);
    }
}

// The weighted sum of a token's rows in router order, eight columns a thread (H is a multiple of
// 8). What was chosen waits in shared memory before the results are there.
template <class Act>
QPN_DEVICE void sum_rows(const Step& step) {
    constexpr int kTurn = 64, kAtOnce = 8;
    __shared__ int32_t slots[kTurn];
    __shared__ float shares[kTurn];
    const int32_t token = blockIdx.y, column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    float sum[8] = {};
    let_next_launch_start();
    for (int32_t first = 0; first < step.top_k; first += kTurn) {
        const int32_t count = min(step.top_k - first, kTurn);
        __syncthreads();
        for (int32_t j = threadIdx.x; j < count; j += blockDim.x) {
            slots[j] = slot_of_row(step, token * step.top_k + first + j);
            shares[j] = router_weight(step, token * step.top_k + first + j);
        }
        __syncthreads();
        if (first == 0) wait_for_launch_before();
        if (column >= step.w2.n) continue;
        const uint16_t* from = step.y + int64_t(token * step.top_k + first) * step.w2.n + column;
        for (int32_t j0 = 0; j0 < count; j0 += kAtOnce) {
            Vector v[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (j0 + i < count && slots[j0 + i] >= 0)
                    v[i] = load_activations(from + int64_t(j0 + i) * step.w2.n);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (j0 + i >= count || slots[j0 + i] < 0) continue;
                const uint32_t pairs[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    sum[c] = fmaf(shares[j0 + i],
                                  Act::to_float(pairs[c / 2] >> (16 * (c % 2)) & 0xffffu), sum[c]);
            }
        }
    }
    if (column >= step.w2.n) return;
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = Act::from_float(sum[2 * i]) | Act::from_float(sum[2 * i + 1]) << 16;
    *reinterpret_cast<uint4*>(step.out + int64_t(token) * step.w2.n + column) =
        make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace qpn
