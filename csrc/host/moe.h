// One MoE layer on the host by the fast routes: rows compacted by active expert, every active
// expert's words read once for up to eight rows.
#pragma once
#include <string>

#include "activations.h"
#include "../device/layout.cuh"
#include "tiles.h"

namespace qpn {

struct MoeCall {
    const Layer* layer;
    int64_t tokens, top_k, experts;  // experts: length of expert_map
    int64_t dtype, weight_dtype;     // Float
    const void* x;                   // (tokens, H) contiguous
    const void* ids;                 // (tokens, top_k), int32 or int64
    bool ids_are_64;
    const void* weights;             // (tokens, top_k)
    const int32_t* expert_map;       // (experts,): slot, or -1
    void* out;                       // (tokens, H) contiguous
    uint8_t* scratch;
    int64_t scratch_bytes;
};

// Scratch that a call with so many tokens needs.
int64_t moe_scratch_bytes(const Layer& layer, int64_t tokens, int64_t top_k);

// Empty on success, else what does not fit.
std::string moe(const MoeCall& call, const TileKernels& kernels, int threads);

struct DequantizeCall {
    const Layer* layer;
    int bank;
    int64_t slot, first, last;  // tiles [first, last)
    float* out;                 // (columns, K)
    int64_t out_floats;
};

std::string dequantize(const DequantizeCall& call, const TileKernels& kernels, int threads);

}  // namespace qpn
