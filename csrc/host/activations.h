// Rows of activations in a scratch, as the tiles read them, and floats of any dtype.
#pragma once
#include <stdint.h>

#include "../device/layout.cuh"
#include "../device/floats.cuh"
#include "tiles.h"

namespace qpn {

enum Float : int64_t { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

inline float read_float(const void* data, int64_t at, int64_t dtype) {
    switch (dtype) {
        case kFloat16: return from_half(static_cast<const uint16_t*>(data)[at]);
        case kBfloat16: return from_bf16(static_cast<const uint16_t*>(data)[at]);
        case kFloat64: return static_cast<float>(static_cast<const double*>(data)[at]);
        default: return static_cast<const float*>(data)[at];
    }
}

inline void write_float(void* data, int64_t at, float value, int64_t dtype) {
    if (dtype == kFloat16)
        static_cast<uint16_t*>(data)[at] = to_half(value);
    else if (dtype == kBfloat16)
        static_cast<uint16_t*>(data)[at] = to_bf16(value);
    else
        static_cast<float*>(data)[at] = value;
}

// Byte offsets of the prepared rows of one bank.
struct Rows {
    int64_t x, digits, sums, scale;
};

// Hands out regions of a scratch, each on a cache line of its own.
struct Regions {
    int64_t bytes = 0;

    int64_t take(int64_t size) {
        const int64_t at = bytes;
        bytes += (size + 63) / 64 * 64;
        return at;
    }

    Rows take_rows(const Bank& bank, int64_t rows) {
        Rows taken;
        taken.x = take(rows * bank.k_padded() * 4);
        taken.digits = take(rows * bank.k_padded() * kMostDigits);
        taken.sums = take(rows * bank.groups() * kMostDigits * 4);
        taken.scale = take(rows * bank.groups() * 4);
        return taken;
    }
};

// The rows of one bank: fp32 values that a caller writes, then `prepare` for the tiles.
struct RowStore {
    const Bank& bank;
    const TileKernels& kernels;
    const Rows at;
    uint8_t* const scratch;
    const int digits;

    RowStore(const Bank& bank_, const TileKernels& kernels_, const Rows& at_, uint8_t* scratch_, int64_t dtype)
        : bank(bank_), kernels(kernels_), at(at_), scratch(scratch_), digits(dtype == kBfloat16 ? 2 : kMostDigits) {}

    // (Kp,) of row n; values from K on must be 0.
    float* x(int64_t n) const { return reinterpret_cast<float*>(scratch + at.x) + n * bank.k_padded(); }

    Row row(int64_t n) const {
        return {x(n), reinterpret_cast<const int8_t*>(scratch + at.digits) + n * bank.k_padded() * kMostDigits,
                reinterpret_cast<const int32_t*>(scratch + at.sums) + n * bank.groups() * kMostDigits,
                reinterpret_cast<const float*>(scratch + at.scale) + n * bank.groups()};
    }

    void prepare(int64_t n, bool fused_bias) const {
        if (fused_bias) return;
        const Row to = row(n);
        kernels.prepare(bank, to.x, digits, const_cast<int8_t*>(to.digits), const_cast<int32_t*>(to.sums),
                        const_cast<float*>(to.scale));
    }

    // Row n of (rows, K) activations.
    void take(const void* data, int64_t n, int64_t dtype, bool fused_bias) const {
        float* to = x(n);
        for (int64_t k = 0; k < bank.k; ++k) to[k] = read_float(data, n * bank.k + k, dtype);
        for (int64_t k = bank.k; k < bank.k_padded(); ++k) to[k] = 0;
        prepare(n, fused_bias);
    }
};

}  // namespace qpn
