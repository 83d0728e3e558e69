// Which kernel serves which bank: one table for each family and activation dtype.
#pragma once
#include "../device/one_run.cuh"
#include "moe.h"

namespace qpn {

enum Part : int {
    kFirst = 0,   // W13 and SwiGLU of passes
    kSecond = 1,  // W2 of passes
    kSum = 2,     // the weighted sum of passes
};

struct Kernel {
    void (*run)(const Step);
    int32_t warps;
    int32_t ring_bytes;  // shared memory of all rings of a block
};

Kernel m16_half(Part part, const Bank& bank, bool fused);
Kernel m16_bf16(Part part, const Bank& bank, bool fused);
Kernel quadpair_half(Part part, const Bank& bank, bool fused);

// The kernel of one token, for W13 or for W2.
constexpr int32_t kOneAhead = 4;  // chunks of a ring
struct OneKernel {
    void (*run)(const OneStep);
    int32_t slot_bytes;  // of a chunk in shared memory
};
OneKernel one_half(const Bank& bank, bool first);
OneKernel one_bf16(const Bank& bank, bool first);

// Most rows of a step that a block of so much shared memory serves; the banks have their shapes.
int64_t moe_most_rows(const Step& step, bool fused, int64_t dtype, int64_t family,
                      int64_t block_bytes);

}  // namespace qpn
