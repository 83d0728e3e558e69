// A linear outside the experts on a card: W2 of a layer whose W13 is absent.
#pragma once
#include "moe.h"

namespace qpn {

// A call as Python fills it; every pointer travels with its capacity in bytes.
struct LinearCall {
    int64_t tokens, dtype, family;  // dtype Float, family Family
    int64_t x_bytes, out_bytes;
    const void* x;  // (tokens, K)
    void* out;      // (tokens, N)
};

// Whether the numbers are those of a linear.
bool is_linear(const int64_t* numbers);

// As `read_banks`, of a linear: `step.w2` is its bank.
const char* read_linear(const int64_t* numbers, void* const* tensors, const int64_t* bytes,
                        int64_t count, Step& step, bool& fused);

// Enqueues one step straight from the bank: null on success, else what does not fit.
const char* linear(const LinearCall& call, Step& step, bool fused, cudaStream_t stream,
                   cudaError_t& status);

}  // namespace qpn
