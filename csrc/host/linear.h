// One linear outside the experts on the host: W2 of a layer whose W13 is absent.
#pragma once
#include <string>

#include "activations.h"
#include "../device/layout.cuh"
#include "tiles.h"

namespace qpn {

struct LinearCall {
    const Layer* layer;
    int64_t tokens;
    int64_t dtype, bias_dtype;  // Float
    const void* x;              // (tokens, K) contiguous
    const void* bias;           // (N,) contiguous, or null
    void* out;                  // (tokens, N) contiguous
    uint8_t* scratch;
    int64_t scratch_bytes;
};

// Scratch that a call with so many tokens needs.
int64_t linear_scratch_bytes(const Layer& layer, int64_t tokens);

// Empty on success, else what does not fit.
std::string linear(const LinearCall& call, const TileKernels& kernels, int threads);

}  // namespace qpn
