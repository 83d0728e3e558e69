// `legacy` from plain numbers, checked before a launch. loader/cuda_legacy_calls.py
// mirrors the structs.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include "../device/qpn.cuh"

namespace qpn {

// A tensor of a call, with its capacity.
struct Span {
    void* at;
    int64_t bytes;
    bool holds(int64_t needed) const { return bytes >= needed && (at != nullptr || needed == 0); }
};

enum LegacyStage : int { kRoute = 0, kGather = 1, kInner = 2, kResults = 3, kSumOfRows = 4 };

struct LegacyCall {
    int64_t tokens, top_k, experts, slots, hidden, width, dtype, weight_dtype, ids_are_64;
    Span x, out, ids, weights, expert_map, keys, source, order, starts, counts, ranked,
        ranked_counts, results;
};

struct LegacyPlaces {
    int64_t count, first, places;
    Span ranked, counts, rows, sums, inner, factors[2];  // factors: of W13 and of W2, or none
};

struct LegacyWeights {
    int64_t count, first_tile, last_tile, dtype;
    Span out, factors, ranked, counts;
};

// Null on success, else what does not fit; `status` is what CUDA says.
const char* legacy(LegacyStage stage, const LegacyCall& call, const LegacyPlaces& places,
                   cudaStream_t stream, cudaError_t& status);
const char* dequantize(const Bank& bank, bool fused, const LegacyWeights& weights,
                       cudaStream_t stream, cudaError_t& status);

}  // namespace qpn
