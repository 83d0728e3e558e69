// The inner loops of the fast routes, once for each instruction set (tiles_*.cpp): one tile of 32
// bank columns times up to eight rows of activations.
#pragma once
#include <stdint.h>

#include "../device/layout.cuh"

namespace qpn {

constexpr int kMostRows = 8;    // rows that one pass over a tile serves
constexpr int kMostDigits = 3;  // bytes that a value of a row is split into (digits_impl.h)

// One row of activations as the tiles read it; see TileKernels::prepare.
struct Row {
    const float* x;         // (Kp,), rows past K are 0
    const int8_t* digits;   // (Kp/8, digits, 8)
    const int32_t* sums;    // (G, digits): sum of each digit over each group
    const float* scale;     // (G,): what the digits count
};

struct TileCall {
    const Bank* bank;
    int64_t slot, tile;
    bool fused_bias;
    int digits;             // 2 or kMostDigits
    int rows;               // 1..kMostRows
    Row row[kMostRows];
    float* y[kMostRows];    // 32 results each
};

struct TileKernels {
    // Splits one row into digits: `to` (Kp/8, digits, 8), `sums` (G, digits), `scale` (G,).
    void (*prepare)(const Bank&, const float* x, int digits, int8_t* to, int32_t* sums, float* scale);
    void (*run)(const TileCall&);
    // Weights of one tile as fp32 (columns, K).
    void (*dequantize)(const Bank&, int64_t slot, int64_t tile, bool fused_bias, float* out);
};

extern const TileKernels kTilesPortable;
#ifdef QPN_X86
extern const TileKernels kTilesAvx2;
extern const TileKernels kTilesAvx512;
#endif

}  // namespace qpn
