// The rows of `legacy`: which result serves which row, rows gathered by expert, SwiGLU, results
// back at their rows, and the weighted sum. Matrix products and the order of rows come from
// outside.
//
// Row r is slot r % top_k of token r / top_k. A chunk is some experts in the order of their rows'
// count; each has the same number of places, of which its first `counts` are rows.
#pragma once
#include "crew.cuh"
#include "numbers.cuh"
#include "qpn.cuh"

namespace qpn {

struct LegacyStep {
    const void* x;              // (tokens, hidden) contiguous
    void* out;                  // (tokens, hidden) contiguous
    const void* ids;            // (tokens, top_k) int32 or int64
    const void* weights;        // (tokens, top_k) Float
    const int32_t* expert_map;  // (experts,): slot, or -1
    int32_t* keys;           // (rows,): slot of a row, or `slots` where it has no result of its own
    int32_t* source;         // (rows,): row whose result serves it, or -1
    int32_t* order;          // (rows,): rows by slot
    int32_t* starts;         // (slots,): where the rows of a slot begin in `order`
    int32_t* counts;         // (slots,): how many they are
    int64_t* ranked;         // (slots,): slots by count, the fullest first
    int32_t* ranked_counts;  // (slots,)
    void* results;           // (rows, hidden)
    int64_t tokens;
    int32_t top_k, experts, slots, hidden, width, ids_are_64, weight_dtype;
};

// Places [first, first + places) of each expert of one chunk.
struct LegacyChunk {
    const int64_t* ranked;  // (count,) slots
    const int32_t* counts;  // (count,) rows of each
    void* rows;             // (count, places, hidden): activations
    float* sums;            // (count, places, 2 width or hidden): of a matrix product
    void* inner;            // (count, places, width): SwiGLU outputs
    const float* factors;   // (count, 2 width or hidden), or null
    int32_t first, places;
};

QPN_DEVICE int32_t legacy_slot(const LegacyStep& step, int64_t row) {
    const int64_t id = step.ids_are_64 ? static_cast<const int64_t*>(step.ids)[row]
                                       : static_cast<const int32_t*>(step.ids)[row];
    if (id < 0 || id >= step.experts) return -1;
    const int32_t slot = step.expert_map[id];
    return slot < step.slots ? slot : -1;
}

// An expert that a token names twice is computed once: a token has one row of an expert.
QPN_DEVICE void legacy_keys(const LegacyStep& step) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= step.tokens * step.top_k) return;
    const int32_t slot = legacy_slot(step, row);
    int64_t source = slot < 0 ? -1 : row / step.top_k * step.top_k;
    while (source >= 0 && source < row && legacy_slot(step, source) != slot) ++source;
    step.source[row] = int32_t(source);
    step.keys[row] = source == row ? slot : step.slots;
}

// Blocks (slots): the rows of a slot in their order. A block counts what comes before its own.
QPN_DEVICE void legacy_order(const LegacyStep& step) {
    __shared__ int32_t totals[32];
    const int32_t slot = blockIdx.x, rows = int32_t(step.tokens * step.top_k);
    int32_t less = 0, own = 0, start = 0, count = 0;
    for (int32_t row = threadIdx.x; row < rows; row += blockDim.x) {
        const int32_t key = step.keys[row];
        less += key < slot;
        own += key == slot;
    }
    sum_before(less, totals, start, whole_block());
    sum_before(own, totals, count, whole_block());
    if (threadIdx.x == 0) step.starts[slot] = start, step.counts[slot] = count;
    for (int32_t first = 0; first < rows && count > 0; first += blockDim.x) {
        const int32_t row = first + threadIdx.x;
        const int32_t mine = row < rows && step.keys[row] == slot;
        int32_t here = 0;
        const int32_t before = sum_before(mine, totals, here, whole_block());
        if (mine) step.order[start + before] = row;
        start += here;
        count -= here;
    }
}

// A thread for each slot: its rank by count; equals keep their order.
QPN_DEVICE void legacy_rank(const LegacyStep& step) {
    const int32_t slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot >= step.slots) return;
    const int32_t own = step.counts[slot];
    int32_t rank = 0;
    for (int32_t other = 0; other < step.slots; ++other) {
        const int32_t count = step.counts[other];
        rank += count > own || (count == own && other < slot);
    }
    step.ranked[rank] = slot;
    step.ranked_counts[rank] = own;
}

// The row at a place of a chunk, or -1 where its expert has fewer.
QPN_DEVICE int64_t legacy_row(const LegacyStep& step, const LegacyChunk& chunk, int32_t expert,
                              int32_t place) {
    const int32_t number = chunk.first + place;
    if (number >= chunk.counts[expert]) return -1;
    return step.order[step.starts[chunk.ranked[expert]] + number];
}

// kEach neighbours of a row as fp32: 4 where sizes and addresses allow, else 1.
template <int kFloat, int kEach>
struct Neighbours {
    static QPN_DEVICE void load(const void* from, int64_t at, float (&v)[kEach]) {
        if constexpr (kFloat == kFloat32 && kEach == 4) {
            const float4 f = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
            v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
        } else if constexpr (kFloat == kFloat32) {
            v[0] = static_cast<const float*>(from)[at];
        } else if constexpr (kEach == 4) {
            const uint2 raw =
                *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + at);
            v[0] = widened(raw.x & 0xffffu), v[1] = widened(raw.x >> 16);
            v[2] = widened(raw.y & 0xffffu), v[3] = widened(raw.y >> 16);
        } else {
            v[0] = widened(static_cast<const uint16_t*>(from)[at]);
        }
    }
    static QPN_DEVICE void store(void* to, int64_t at, const float (&v)[kEach]) {
        if constexpr (kFloat == kFloat32 && kEach == 4) {
            *reinterpret_cast<float4*>(static_cast<float*>(to) + at) =
                make_float4(v[0], v[1], v[2], v[3]);
        } else if constexpr (kFloat == kFloat32) {
            static_cast<float*>(to)[at] = v[0];
        } else if constexpr (kEach == 4) {
            *reinterpret_cast<uint2*>(static_cast<uint16_t*>(to) + at) = make_uint2(
                narrowed(v[0]) | narrowed(v[1]) << 16, narrowed(v[2]) | narrowed(v[3]) << 16);
        } else {
            static_cast<uint16_t*>(to)[at] = uint16_t(narrowed(v[0]));
        }
    }
    static QPN_DEVICE float rounded(float value) {
        if constexpr (kFloat == kFloat32) return value;
        return widened(narrowed(value));
    }

 private:
    static QPN_DEVICE float widened(uint32_t bits) {
        return kFloat == kBfloat16 ? bf16_to_float(bits) : half_to_float(bits);
    }
    static QPN_DEVICE uint32_t narrowed(float value) {
        return kFloat == kBfloat16 ? float_to_bf16(value) : float_to_half(value);
    }
};

// Blocks (places, experts): activations of a chunk's rows.
template <int kFloat, int kEach>
QPN_DEVICE void legacy_gather(const LegacyStep& step, const LegacyChunk& chunk) {
    using Some = Neighbours<kFloat, kEach>;
    const int32_t place = blockIdx.x, expert = blockIdx.y;
    const int64_t row = legacy_row(step, chunk, expert, place);
    if (row < 0) return;
    const int64_t from = row / step.top_k * step.hidden,
                  to = (int64_t(expert) * chunk.places + place) * step.hidden;
    for (int32_t i = threadIdx.x * kEach; i < step.hidden; i += blockDim.x * kEach) {
        float v[kEach];
        Some::load(step.x, from + i, v);
        Some::store(chunk.rows, to + i, v);
    }
}

// Blocks (places, experts): silu(gate) * up, rounded where docs/routes.md says.
template <int kFloat, int kEach>
QPN_DEVICE void legacy_inner(const LegacyStep& step, const LegacyChunk& chunk) {
    using Some = Neighbours<kFloat, kEach>;
    using Sums = Neighbours<kFloat32, kEach>;
    const int32_t place = blockIdx.x, expert = blockIdx.y;
    if (chunk.first + place >= chunk.counts[expert]) return;
    const int64_t to = (int64_t(expert) * chunk.places + place) * step.width, from = 2 * to;
    const int64_t factors = int64_t(expert) * 2 * step.width;
    for (int32_t i = threadIdx.x * kEach; i < step.width; i += blockDim.x * kEach) {
        float both[2][kEach], scale[2][kEach], v[kEach];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Sums::load(chunk.sums, from + 2 * i + half * kEach, both[half]);
            if (chunk.factors != nullptr)
                Sums::load(chunk.factors, factors + 2 * i + half * kEach, scale[half]);
#pragma unroll
            for (int c = 0; c < kEach; ++c)
                both[half][c] = Some::rounded(
                    chunk.factors != nullptr ? both[half][c] * scale[half][c] : both[half][c]);
        }
#pragma unroll
        for (int c = 0; c < kEach; ++c) {
            const float gate = both[2 * c / kEach][2 * c % kEach],
                        up = both[(2 * c + 1) / kEach][(2 * c + 1) % kEach];
            v[c] = gate / (1.0f + expf(-gate)) * up;
        }
        Some::store(chunk.inner, to + i, v);
    }
}

// Blocks (places, experts): sums of W2, rounded once each, to the rows that they are of.
template <int kFloat, int kEach>
QPN_DEVICE void legacy_results(const LegacyStep& step, const LegacyChunk& chunk) {
    using Some = Neighbours<kFloat, kEach>;
    using Sums = Neighbours<kFloat32, kEach>;
    const int32_t place = blockIdx.x, expert = blockIdx.y;
    const int64_t row = legacy_row(step, chunk, expert, place);
    if (row < 0) return;
    const int64_t from = (int64_t(expert) * chunk.places + place) * step.hidden,
                  factors = int64_t(expert) * step.hidden;
    for (int32_t i = threadIdx.x * kEach; i < step.hidden; i += blockDim.x * kEach) {
        float v[kEach], scale[kEach];
        Sums::load(chunk.sums, from + i, v);
        if (chunk.factors != nullptr) {
            Sums::load(chunk.factors, factors + i, scale);
#pragma unroll
            for (int c = 0; c < kEach; ++c) v[c] *= scale[c];
        }
        Some::store(step.results, row * step.hidden + i, v);
    }
}

QPN_DEVICE float legacy_weight(const LegacyStep& step, int64_t row) {
    switch (step.weight_dtype) {
        case kFloat16:
            return half_to_float(static_cast<const uint16_t*>(step.weights)[row]);
        case kBfloat16:
            return bf16_to_float(static_cast<const uint16_t*>(step.weights)[row]);
        case kFloat64:
            return float(static_cast<const double*>(step.weights)[row]);
        default:
            return static_cast<const float*>(step.weights)[row];
    }
}

// Blocks (tokens): the weighted sum in router order. A skipped row takes no part, whatever its
// weight.
template <int kFloat, int kEach>
QPN_DEVICE void legacy_sum(const LegacyStep& step) {
    using Some = Neighbours<kFloat, kEach>;
    const int64_t token = blockIdx.x, rows = token * step.top_k;
    for (int32_t i = threadIdx.x * kEach; i < step.hidden; i += blockDim.x * kEach) {
        float sum[kEach] = {};
        for (int32_t j = 0; j < step.top_k; ++j) {
            const int32_t source = step.source[rows + j];
            if (source < 0) continue;
            const float weight = legacy_weight(step, rows + j);
            float v[kEach];
            Some::load(step.results, int64_t(source) * step.hidden + i, v);
#pragma unroll
            for (int c = 0; c < kEach; ++c) sum[c] = fmaf(weight, v[c], sum[c]);
        }
        Some::store(step.out, token * step.hidden + i, sum);
    }
}

}  // namespace qpn
