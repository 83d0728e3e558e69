// What one block of the kernel of one token has to do: its experts, its run of chunks, and which
// part of that each warp takes.
#pragma once
#include "digits.cuh"
#include "routing.cuh"
#include "turn.cuh"

namespace qpn {

constexpr int kMostChosen = 32;  // experts of the token

// One of the two launches, of W13 or of W2.
struct OneStep {
    Bank bank;
    const uint16_t* x;          // (H,) contiguous: W13
    uint16_t* out;              // (H,) contiguous: W2
    const void* ids;            // (top_k,) int32 or int64
    const void* weights;        // (top_k,) Float
    const int32_t* expert_map;  // (experts,): slot, or -1
    uint8_t* hidden;            // (top_k, hidden_bytes): rows of digits and notes, as W2 takes them
    int32_t top_k, experts, ids_are_64, weight_dtype;
    int32_t hidden_chunks;  // of a row of `hidden`
    int32_t partials;       // see partials_of
};

// Shared memory, in bytes from its start, where the rings are.
struct OneLayout {
    int32_t row;    // of activations: digits and notes
    int32_t notes;  // in a row
    int32_t zeros, rows, part, shares, results, barriers, bytes;

    QPN_BOTH OneLayout(int32_t chunks, int32_t count, int32_t partials, int32_t ahead,
                       int32_t slot_bytes) {
        notes = chunks * kDigitBytes;
        row = chunks * kDigitRowBytes;
        zeros = kPairs * ahead * slot_bytes;
        rows = zeros + kTile * 4;
        part = rows + count * row;
        shares = part + kPairs * partials * kTile * 4;
        results = shares + kMostChosen * 4;
        barriers = results + count * kTile * 4;
        bytes = barriers + kPairs * ahead * 16 + 16;
    }
};

// The experts of the token that are on this card, in router order: lane r holds the r-th.
struct Chosen {
    int32_t slot, row, count;

    // The expert of this lane's row: asked for before anything else.
    static QPN_DEVICE int64_t id_of(const OneStep& step, int lane) {
        if (lane >= step.top_k) return -1;
        return step.ids_are_64 ? static_cast<const int64_t*>(step.ids)[lane]
                               : static_cast<const int32_t*>(step.ids)[lane];
    }
    QPN_DEVICE Chosen(const OneStep& step, int64_t id, int lane) {
        slot = -1;
        row = lane;
        if (id >= 0 && id < step.experts) slot = step.expert_map[id];
        if (slot >= step.bank.experts) slot = -1;
        const uint32_t valid = __ballot_sync(0xffffffffu, slot >= 0);
        count = __popc(valid);
        if (count == step.top_k) return;
        row = 0;  // the place of the r-th bit
#pragma unroll 1
        for (int d = 16; d > 0; d /= 2)
            if (__popc(valid & ((1u << (row + d)) - 1)) <= lane) row += d;
        slot = __shfl_sync(0xffffffffu, slot, row);
    }
    QPN_DEVICE int32_t slot_of(int32_t number) const {
        return __shfl_sync(0xffffffffu, slot, number);
    }
};

// The run of a block: `count` tiles of W13 (number n is tile `first_tile` + n of all tiles of all
// chosen experts), or the chosen experts of one tile of W2.
template <bool kFirst>
struct Run {
    int32_t first_tile, count, chunks, all;  // all: chunks of the run

    QPN_DEVICE Run(const OneStep& step, const Chosen& chosen) {
        first_tile = 0;
        count = chosen.count;
        chunks = step.bank.chunks();
        if (kFirst) {
            const uint32_t tiles = chosen.count * step.bank.tiles;
            first_tile = tiles * blockIdx.x / gridDim.x;
            count = int32_t(tiles * (blockIdx.x + 1) / gridDim.x) - first_tile;
        }
        all = count * chunks;
    }
    QPN_DEVICE void place(const OneStep& step, int32_t number, int32_t& expert,
                          int32_t& tile) const {
        expert = number;
        tile = blockIdx.x;
        if (!kFirst) return;
        expert = uint32_t(first_tile + number) / uint32_t(step.bank.tiles);
        tile = first_tile + number - expert * step.bank.tiles;
    }
};

}  // namespace qpn
