// Which kernel serves which bank: one table for each family and activation dtype.
#pragma once
#include "moe.h"

namespace qpn {

enum Part : int {
    kFirstOfOne = 0,   // W13 and SwiGLU of one token
    kSecondOfOne = 1,  // W2 and the weighted sum of one token
    kFirst = 2,        // W13 and SwiGLU of passes
    kSecond = 3,       // W2 of passes
    kSum = 4,          // the weighted sum of passes
};

struct Kernel {
    void (*run)(const Step);
    int32_t warps;
    int32_t ring_bytes;  // shared memory of all rings of a block
};

// `run` is null where a family has no such kernel.
Kernel m16_half(Part part, const Bank& bank, bool fused);
Kernel m16_bf16(Part part, const Bank& bank, bool fused);
Kernel quadpair_half(Part part, const Bank& bank, bool fused);

}  // namespace qpn
