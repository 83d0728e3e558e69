// One step of one MoE layer on a card: what the kernels take, filled and checked from plain
// numbers.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include "../device/routing.cuh"

namespace qpn {

constexpr int64_t kLayerNumbers = 21;  // LayerSpec.to_ints

// A call as Python fills it; every pointer travels with its capacity in bytes.
struct MoeCall {
    int64_t tokens, top_k, experts, dtype, weight_dtype, ids_are_64;
    int64_t family, in_router_order;  // Family; 1: qpn_m1
    int64_t x_bytes, ids_bytes, weights_bytes, expert_map_bytes, out_bytes, scratch_bytes;
    const void *x, *ids, *weights, *expert_map;
    void *out, *scratch;
};

// Fills the two banks; null on success, else what does not fit.
const char* read_banks(const int64_t* numbers, void* const* tensors, const int64_t* bytes,
                       int64_t count, Step& step, bool& fused);

// Bytes of scratch that a step needs: SwiGLU outputs, and W2 results where several tokens share
// them.
int64_t moe_scratch_bytes(const Step& step, int64_t tokens, int64_t top_k);

// Enqueues one step: null on success, else what does not fit. `status` is what CUDA says.
const char* moe(const MoeCall& call, Step& step, bool fused, cudaStream_t stream,
                cudaError_t& status);

}  // namespace qpn
