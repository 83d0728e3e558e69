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

// Runs of so many blocks of 32 rows lie in one group for sure.
inline bool in_one_group(const Bank& bank, int blocks) {
    return bank.groups == 1 ||
           (bank.group_segments % (2 * blocks) == 0 && bank.phase_segments % (2 * blocks) == 0);
}

struct Kernel {
    void (*run)(const Step);
    int32_t warps;
    int32_t blocks;  // of a processor
    // Shared memory of a block, of a step with so many experts and rows.
    int64_t (*shared_bytes)(const Bank& bank, int64_t experts, int64_t rows);
};

// Any bank.
Kernel m16_half(Part part, const Bank& bank, bool fused);
Kernel m16_bf16(Part part, const Bank& bank, bool fused);
Kernel quadpair_half(Part part, const Bank& bank, bool fused);
// int4 with blocks of 32 rows in one group; `run` is null for other banks.
Kernel grouped_half(Part part, const Bank& bank);
Kernel grouped_bf16(Part part, const Bank& bank);

// Which kernels a call may have.
struct Choice {
    int64_t dtype, family;  // Float, Family
    bool fused;
    Kernel any(Part part, const Bank& bank) const;
    // The fastest one for a block of so much shared memory.
    Kernel fastest(Part part, const Bank& bank, int64_t experts, int64_t rows,
                   int64_t block_bytes) const;
};

// The kernel of one token, for W13 or for W2.
constexpr int32_t kOneAhead = 4;  // chunks of a ring
struct OneKernel {
    void (*run)(const OneStep);
    int32_t slot_bytes;  // of a chunk in shared memory
};
OneKernel one_half(const Bank& bank, bool first);
OneKernel one_bf16(const Bank& bank, bool first);

// Most rows of a step that a block of so much shared memory serves; the banks have their shapes.
int64_t moe_most_rows(const Step& step, const Choice& choice, int64_t block_bytes);

}  // namespace qpn
