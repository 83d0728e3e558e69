// Which experts a step selects: slots of rows, and rows compacted by active expert.
#pragma once
#include "crew.cuh"
#include "numbers.cuh"
#include "qpn.cuh"

namespace qpn {

// One step of one layer, as every kernel takes it. Row r is slot r % top_k of token r / top_k.
struct Step {
    Bank w13, w2;
    const uint16_t* x;          // (tokens, H) contiguous
    uint16_t* out;              // (tokens, H) contiguous
    const void* ids;            // (tokens, top_k) int32 or int64
    const void* weights;        // (tokens, top_k) Float
    const int32_t* expert_map;  // (experts,): slot, or -1
    uint16_t* hidden;           // (rows, hidden_pitch)
    uint16_t* y;                // (rows, H)
    int32_t tokens, top_k, experts, ids_are_64, weight_dtype;
    int32_t hidden_pitch;
    int32_t splits13, splits2;  // warps that share the K of a tile
};

QPN_DEVICE int32_t slot_of_row(const Step& step, int32_t row) {
    const int64_t id = step.ids_are_64 ? static_cast<const int64_t*>(step.ids)[row]
                                       : static_cast<const int32_t*>(step.ids)[row];
    if (id < 0 || id >= step.experts) return -1;
    const int32_t slot = step.expert_map[id];
    return slot < step.w13.experts ? slot : -1;
}

// Lines that a step reads first are asked for while the launch before may still write some of them:
// a value is taken only after waiting for it.
QPN_DEVICE void prefetch_routing(const Step& step) {
    for (int32_t i = threadIdx.x; i * 32 < step.experts; i += blockDim.x)
        prefetch_line(step.expert_map + i * 32);
    const int64_t rows = int64_t(step.tokens) * step.top_k;
    for (int64_t at = threadIdx.x * 128; at < rows * (step.ids_are_64 ? 8 : 4);
         at += blockDim.x * 128)
        prefetch_line(static_cast<const uint8_t*>(step.ids) + at);
    for (int64_t at = threadIdx.x * 128; at < rows * 4; at += blockDim.x * 128)
        prefetch_line(static_cast<const uint8_t*>(step.weights) +
                      (step.weight_dtype == kFloat64   ? at * 2
                       : step.weight_dtype == kFloat32 ? at
                                                       : at / 2));
}

QPN_DEVICE float router_weight(const void* weights, int32_t dtype, int32_t row) {
    switch (dtype) {
        case kFloat16:
            return half_to_float(static_cast<const uint16_t*>(weights)[row]);
        case kBfloat16:
            return bf16_to_float(static_cast<const uint16_t*>(weights)[row]);
        case kFloat64:
            return float(static_cast<const double*>(weights)[row]);
        default:
            return static_cast<const float*>(weights)[row];
    }
}
QPN_DEVICE float router_weight(const Step& step, int32_t row) {
    return router_weight(step.weights, step.weight_dtype, row);
}

// Rows by active expert, in shared memory; a pass is up to `kPassRows` rows of one expert.
struct Routing {
    int32_t* counts;     // (slots,) rows of each, then where its rows begin
    int32_t* slot;       // (rows,) of each row
    int32_t* placed;     // (rows,) position of a row among those of its expert
    int32_t* order;      // (rows,) rows by expert
    int32_t* pass_slot;  // (passes,) at most one for each row
    int32_t* pass_rows;  // (passes,) first << 4 | count
    int32_t* totals;     // (32,) one for each warp
    int32_t* passes;     // (1,)

    // A row of a pass, or -1 where it has fewer.
    QPN_DEVICE int32_t row_of(int32_t pass, int32_t number) const {
        const int32_t rows = pass_rows[pass];
        return number < (rows & 15) ? order[(rows >> 4) + number] : -1;
    }

    static QPN_BOTH int64_t ints(int64_t slots, int64_t rows) { return slots + 5 * rows + 33; }

    QPN_DEVICE Routing(int32_t* memory, int32_t slots, int32_t rows)
        : counts(memory),
          slot(memory + slots),
          placed(slot + rows),
          order(placed + rows),
          pass_slot(order + rows),
          pass_rows(pass_slot + rows),
          totals(pass_rows + rows),
          passes(totals + 32) {}
};

// Rows and passes before a slot share one number, so that one scan gives both.
constexpr int kPassShift = 16;
constexpr int kMostRows = (1 << kPassShift) - 1;

// At most kMostRows rows. Every block of a launch must deal the same rows to the same passes, so
// rows keep their order within an expert: one warp ranks them, 32 at a time.
QPN_DEVICE void compact_rows(Routing& r, const Step& step, const Crew& crew) {
    const int32_t slots = step.w13.experts, rows = step.tokens * step.top_k;
    const int32_t thread = crew.thread, threads = crew.threads;
    for (int32_t s = thread; s < slots; s += threads) r.counts[s] = 0;
    for (int32_t row = thread; row < rows; row += threads) r.slot[row] = slot_of_row(step, row);
    crew.sync();
    if (thread < 32) {
        for (int32_t first = 0; first < rows; first += 32) {
            const int32_t row = first + thread, slot = row < rows ? r.slot[row] : -1;
            const uint32_t alike = __match_any_sync(0xffffffffu, slot);
            const int32_t ahead = __popc(alike & ((1u << thread) - 1));
            const int32_t before = slot >= 0 ? r.counts[slot] : 0;
            __syncwarp();
            if (slot >= 0) {
                r.placed[row] = before + ahead;
                if (ahead == 0) r.counts[slot] = before + __popc(alike);
            }
            __syncwarp();
        }
    }
    crew.sync();
    const int32_t each = (slots + threads - 1) / threads;
    const int32_t first = min(thread * each, slots), last = min(first + each, slots);
    int32_t mine = 0, all = 0;
    for (int32_t s = first; s < last; ++s) {
        const int32_t count = r.counts[s];
        mine += count | ((count + kPassRows - 1) / kPassRows) << kPassShift;
    }
    const uint32_t before = sum_before(mine, r.totals, all, crew);
    if (thread == 0) *r.passes = uint32_t(all) >> kPassShift;
    int32_t at = before & kMostRows, pass = before >> kPassShift;
    for (int32_t s = first; s < last; ++s) {
        const int32_t count = r.counts[s];
        r.counts[s] = at;
        for (int32_t done = 0; done < count; done += kPassRows, ++pass) {
            r.pass_slot[pass] = s;
            r.pass_rows[pass] = (at + done) << 4 | min(count - done, kPassRows);
        }
        at += count;
    }
    crew.sync();
    for (int32_t row = thread; row < rows; row += threads)
        if (r.slot[row] >= 0) r.order[r.counts[r.slot[row]] + r.placed[row]] = row;
    crew.sync();
}

}  // namespace qpn
