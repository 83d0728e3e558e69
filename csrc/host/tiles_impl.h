// Included by tiles_*.cpp with QPN_TILES set to the name of its table.
#include "dequantize_impl.h"
#include "digits_impl.h"
#include "fused_impl.h"

namespace qpn {
namespace {

void prepare(const Bank& bank, const float* x, int digits, int8_t* to, int32_t* sums, float* scale) {
    if (digits == 2)
        split_row<2>(bank, x, to, sums, scale);
    else
        split_row<3>(bank, x, to, sums, scale);
}

// e2m1 codes come doubled, and the global applies to the fp32 sum: both at the end.
void close_e2m1(const TileCall& call) {
    for (int r = 0; r < call.rows; ++r)
        for (int c = 0; c < kTile; ++c) {
            const float value = call.y[r][c] * 0.5f;
            const bool global = call.bank->layout == kCompact;
            call.y[r][c] = global ? with_global(*call.bank, call.slot, c, value) : value;
        }
}

void run(const TileCall& call) {
    if (call.fused_bias) return run_fused(call);
    const bool two = call.digits == 2;
    if (call.bank->kind == kE2m1) {
        two ? run_digits<E2m1, 2>(call) : run_digits<E2m1, 3>(call);
        close_e2m1(call);
    } else {
        two ? run_digits<Int4, 2>(call) : run_digits<Int4, 3>(call);
    }
}

}  // namespace

extern const TileKernels QPN_TILES;
const TileKernels QPN_TILES = {prepare, run, dequantize};

}  // namespace qpn
