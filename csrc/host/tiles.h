// The inner loops of the fast routes, once for each instruction set (tiles_*.cpp): one tile of 32
// bank columns times up to eight rows of activations.
#pragma once
#include <stdint.h>

#include "layout.h"

namespace qpn {

constexpr int kMostRows = 8;  // rows that one pass over a tile serves

struct TileCall {
    const Bank* bank;
    int64_t slot, tile;
    bool fused_bias;
    int rows;                       // 1..kMostRows
    const float* x[kMostRows];      // (Kp,) fp32 each, rows past K are 0
    const float* sums[kMostRows];   // (G,) fp32 each: sum of x over each group
    float* y[kMostRows];            // 32 results each
};

struct TileKernels {
    void (*run)(const TileCall&);
    // Weights of one tile as fp32 (columns, K), in the order of DESIGN section 5.
    void (*dequantize)(const Bank&, int64_t slot, int64_t tile, bool fused_bias, float* out);
};

extern const TileKernels kTilesPortable;
#ifdef QPN_X86
extern const TileKernels kTilesAvx2;
extern const TileKernels kTilesAvx512;
#endif

}  // namespace qpn
