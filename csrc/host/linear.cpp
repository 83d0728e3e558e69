#include "linear.h"

#include <algorithm>

#include "check.h"
#include "pool.h"

namespace qpn {
namespace {

constexpr int64_t kTilesOfJob = 4;

class Product {
   public:
    Product(const LinearCall& call, const TileKernels& kernels, int threads)
        : call_(call),
          kernels_(kernels),
          threads_(threads),
          bank_(call.layer->bank[1]),
          rows_(bank_, kernels, Regions{}.take_rows(bank_, call.tokens), call.scratch, call.dtype) {}

    void run() {
        parallel(threads_, call_.tokens, [&](int64_t t, int) {
            rows_.take(call_.x, t, call_.dtype, call_.layer->fused_bias);
        });
        const int64_t jobs = (bank_.tiles() + kTilesOfJob - 1) / kTilesOfJob;
        parallel(threads_, jobs, [&](int64_t job, int) {
            const int64_t last = std::min((job + 1) * kTilesOfJob, bank_.tiles());
            for (int64_t tile = job * kTilesOfJob; tile < last; ++tile) columns(tile);
        });
    }

   private:
    // One tile for all tokens, its words read once for up to eight of them.
    void columns(int64_t number) {
        alignas(64) float results[kMostRows][kTile];
        TileCall tile{};
        tile.bank = &bank_;
        tile.slot = 0;
        tile.tile = number;
        tile.fused_bias = call_.layer->fused_bias;
        tile.digits = rows_.digits;
        for (int64_t t = 0; t < call_.tokens; t += kMostRows) {
            tile.rows = static_cast<int>(std::min<int64_t>(kMostRows, call_.tokens - t));
            for (int r = 0; r < tile.rows; ++r) {
                tile.row[r] = rows_.row(t + r);
                tile.y[r] = results[r];
            }
            kernels_.run(tile);
            for (int r = 0; r < tile.rows; ++r) give(t + r, number * kTile, results[r]);
        }
    }

    // The bias joins the fp32 sum, which is rounded once.
    void give(int64_t t, int64_t first, const float* y) {
        const int64_t count = std::min(kTile, bank_.n - first);
        for (int64_t c = 0; c < count; ++c) {
            const float bias = call_.bias ? read_float(call_.bias, first + c, call_.bias_dtype) : 0;
            write_float(call_.out, t * bank_.n + first + c, y[c] + bias, call_.dtype);
        }
    }

    const LinearCall& call_;
    const TileKernels& kernels_;
    const int threads_;
    const Bank& bank_;
    const RowStore rows_;
};

}  // namespace

int64_t linear_scratch_bytes(const Layer& layer, int64_t tokens) {
    Regions regions;
    regions.take_rows(layer.bank[1], tokens);
    return regions.bytes;
}

std::string linear(const LinearCall& call, const TileKernels& kernels, int threads) {
    const std::string wrong = check_layer(*call.layer, false);
    if (!wrong.empty()) return wrong;
    if (call.layer->bank[1].kind >= kPlain) return "the fast routes read quantized banks only";
    if (call.layer->bank[1].projections != 1) return "a linear has one projection";
    if (call.tokens < 0 || call.tokens > int64_t{1} << 30)
        return "the number of tokens is not that of a step";
    if (call.scratch_bytes < linear_scratch_bytes(*call.layer, call.tokens))
        return "the scratch is smaller than this many tokens need";
    Product(call, kernels, threads).run();
    return "";
}

}  // namespace qpn
