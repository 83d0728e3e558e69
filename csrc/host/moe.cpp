#include "moe.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "check.h"
#include "pool.h"

namespace qpn {
namespace {

constexpr int64_t kTilesOfJob = 4;

float rounded(float value, int64_t dtype) {
    if (dtype == kFloat16) return from_half(to_half(value));
    if (dtype == kBfloat16) return from_bf16(to_bf16(value));
    return value;
}

// Regions of the scratch: prepared rows, floats, int64.
struct Plan : Regions {
    Rows input, hidden;
    int64_t y, order, starts, active;

    Plan(const Layer& layer, int64_t tokens, int64_t top_k) {
        const Bank &w13 = layer.bank[0], &w2 = layer.bank[1];
        const int64_t rows = tokens * top_k;
        input = take_rows(w13, tokens);
        hidden = take_rows(w2, rows);
        y = take(rows * w2.n_padded() * 4);
        order = take(rows * 8);
        starts = take((rows + 1) * 8);
        active = take(rows * 8);
    }
};

class Step {
   public:
    Step(const MoeCall& call, const TileKernels& kernels, int threads)
        : call_(call),
          kernels_(kernels),
          threads_(threads),
          w13_(call.layer->bank[0]),
          w2_(call.layer->bank[1]),
          plan_(*call.layer, call.tokens, call.top_k),
          input_(w13_, kernels, plan_.input, call.scratch, call.dtype),
          hidden_(w2_, kernels, plan_.hidden, call.scratch, call.dtype) {}

    void run() {
        compact();
        parallel(threads_, call_.tokens, [&](int64_t t, int) {
            input_.take(call_.x, t, call_.dtype, call_.layer->fused_bias);
        });
        over_tiles(w13_, [&](int64_t active, int64_t tile) { first(active, tile); });
        parallel(threads_, rows_, [&](int64_t row, int) {
            hidden_.prepare(order()[row], call_.layer->fused_bias);
        });
        over_tiles(w2_, [&](int64_t active, int64_t tile) { second(active, tile); });
        parallel(threads_, call_.tokens * kSlices, [&](int64_t n, int) { reduce(n / kSlices, n % kSlices); });
    }

   private:
    static constexpr int64_t kSlices = 2;

    float* floats(int64_t at) const { return reinterpret_cast<float*>(call_.scratch + at); }
    int64_t* order() const { return reinterpret_cast<int64_t*>(call_.scratch + plan_.order); }
    int64_t* starts() const { return reinterpret_cast<int64_t*>(call_.scratch + plan_.starts); }
    int64_t* active() const { return reinterpret_cast<int64_t*>(call_.scratch + plan_.active); }
    float* y(int64_t row) const { return floats(plan_.y) + row * w2_.n_padded(); }

    int64_t slot_of(int64_t row) const {
        const int64_t id = call_.ids_are_64 ? static_cast<const int64_t*>(call_.ids)[row]
                                            : static_cast<const int32_t*>(call_.ids)[row];
        if (id < 0 || id >= call_.experts) return -1;
        const int64_t slot = call_.expert_map[id];
        return slot < w13_.experts ? slot : -1;
    }

    // Rows in the order of their experts; one token keeps the router's order.
    void compact() {
        rows_ = 0;
        const int64_t all = call_.tokens * call_.top_k;
        for (int64_t row = 0; row < all; ++row)
            if (slot_of(row) >= 0) order()[rows_++] = row;
        if (call_.tokens > 1)
            std::stable_sort(order(), order() + rows_,
                             [&](int64_t a, int64_t b) { return slot_of(a) < slot_of(b); });
        experts_ = 0;
        for (int64_t i = 0; i < rows_; ++i) {
            const int64_t slot = slot_of(order()[i]);
            if (experts_ == 0 || slot != active()[experts_ - 1] || call_.tokens == 1) {
                active()[experts_] = slot;
                starts()[experts_++] = i;
            }
        }
        starts()[experts_] = rows_;
    }

    template <class F>
    void over_tiles(const Bank& bank, const F& tile_job) {
        const int64_t each = (bank.tiles() + kTilesOfJob - 1) / kTilesOfJob;
        parallel(threads_, experts_ * each, [&](int64_t job, int) {
            const int64_t first = job % each * kTilesOfJob;
            const int64_t last = std::min(first + kTilesOfJob, bank.tiles());
            for (int64_t tile = first; tile < last; ++tile) tile_job(job / each, tile);
        });
    }

    // Runs one tile of one active expert for all of its rows, `give(row, y)` for each.
    template <class I, class G>
    void tile(const RowStore& rows, int64_t which, int64_t number, const I& input, const G& give) {
        alignas(64) float results[kMostRows][kTile];
        TileCall tile{};
        tile.bank = &rows.bank;
        tile.slot = active()[which];
        tile.tile = number;
        tile.fused_bias = call_.layer->fused_bias;
        tile.digits = rows.digits;
        for (int64_t i = starts()[which]; i < starts()[which + 1]; i += kMostRows) {
            tile.rows = static_cast<int>(std::min<int64_t>(kMostRows, starts()[which + 1] - i));
            for (int r = 0; r < tile.rows; ++r) {
                tile.row[r] = rows.row(input(order()[i + r]));
                tile.y[r] = results[r];
            }
            kernels_.run(tile);
            for (int r = 0; r < tile.rows; ++r) give(order()[i + r], results[r]);
        }
    }

    // W13 and SwiGLU: gate and up of one i are neighbours in a tile.
    void first(int64_t which, int64_t number) {
        const int64_t top_k = call_.top_k, dtype = call_.dtype;
        tile(
            input_, which, number, [&](int64_t n) { return n / top_k; },
            [&](int64_t n, const float* both) {
                float* const all = hidden_.x(n);
                float* to = all + number * (kTile / 2);
                const int64_t count = std::min(kTile / 2, w2_.k - number * (kTile / 2));
                for (int64_t i = 0; i < count; ++i) {
                    const float gate = rounded(both[2 * i], dtype), up = rounded(both[2 * i + 1], dtype);
                    to[i] = rounded(gate / (1.0f + expf(-gate)) * up, dtype);
                }
                if ((number + 1) * (kTile / 2) >= w2_.k)
                    for (int64_t i = w2_.k; i < w2_.k_padded(); ++i) all[i] = 0;
            });
    }

    void second(int64_t which, int64_t number) {
        tile(
            hidden_, which, number, [&](int64_t n) { return n; },
            [&](int64_t n, const float* result) {
                float* to = y(n) + number * kTile;
                for (int64_t c = 0; c < kTile; ++c) to[c] = rounded(result[c], call_.dtype);
            });
    }

    // The weighted sum in router order, rounded once.
    void reduce(int64_t t, int64_t slice) {
        const int64_t first = w2_.n * slice / kSlices, last = w2_.n * (slice + 1) / kSlices;
        for (int64_t n0 = first; n0 < last; n0 += 256) {
            const int64_t count = std::min<int64_t>(256, last - n0);
            float total[256] = {};
            for (int64_t j = 0; j < call_.top_k; ++j) {
                const int64_t row = t * call_.top_k + j;
                if (slot_of(row) < 0) continue;
                const float weight = read_float(call_.weights, row, call_.weight_dtype);
                const float* from = y(row) + n0;
                for (int64_t i = 0; i < count; ++i) total[i] += weight * from[i];
            }
            for (int64_t i = 0; i < count; ++i)
                write_float(call_.out, t * w2_.n + n0 + i, total[i], call_.dtype);
        }
    }

    const MoeCall& call_;
    const TileKernels& kernels_;
    const int threads_;
    const Bank &w13_, &w2_;
    const Plan plan_;
    const RowStore input_, hidden_;
    int64_t rows_ = 0, experts_ = 0;
};

}  // namespace

int64_t moe_scratch_bytes(const Layer& layer, int64_t tokens, int64_t top_k) {
    return Plan(layer, tokens, top_k).bytes;
}

std::string moe(const MoeCall& call, const TileKernels& kernels, int threads) {
    const std::string wrong = check_layer(*call.layer, false);
    if (!wrong.empty()) return wrong;
    for (const Bank& bank : call.layer->bank)
        if (bank.kind >= kPlain) return "the fast routes read quantized banks only";
    if (call.tokens < 0 || call.top_k < 1 || call.tokens > (int64_t{1} << 30) / call.top_k)
        return "the number of tokens is not that of a step";
    if (call.scratch_bytes < moe_scratch_bytes(*call.layer, call.tokens, call.top_k))
        return "the scratch is smaller than this many tokens need";
    Step(call, kernels, threads).run();
    return "";
}

std::string dequantize(const DequantizeCall& call, const TileKernels& kernels, int threads) {
    const std::string wrong = check_layer(*call.layer, false);
    if (!wrong.empty()) return wrong;
    if (call.bank < 0 || call.bank > 1) return "bank is neither 0 nor 1";
    const Bank& bank = call.layer->bank[call.bank];
    if (bank.kind >= kPlain) return "plain weights are not dequantized";
    if (call.slot < 0 || call.slot >= bank.experts) return "slot is outside the bank";
    if (call.first < 0 || call.last <= call.first || call.last > bank.tiles())
        return "tiles are outside the bank";
    const int64_t columns = std::min(call.last * kTile, bank.n) - call.first * kTile;
    if (call.out_floats < columns * bank.k) return "the output is smaller than the tiles";
    parallel(threads, call.last - call.first, [&](int64_t n, int) {
        kernels.dequantize(bank, call.slot, call.first + n, call.layer->fused_bias,
                           call.out + n * kTile * bank.k);
    });
    return "";
}

}  // namespace qpn
