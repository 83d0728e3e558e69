// A ring of slots in shared memory between a warp that copies and one that multiplies.
#pragma once
#include "barrier.cuh"

namespace qpn {

constexpr int kPairs = 8;  // warps that multiply, and as many that copy
constexpr int kPairWarps = 2 * kPairs, kPairThreads = kPairWarps * 32;
constexpr int kMultiplyThreads = kPairs * 32;

// Where a warp stands in the ring of its pair. Two barriers a slot: "full", then "empty".
template <int kSlotBytes, int kAhead>
struct Turn {
    uint32_t slot, full, parity = 0;
    const uint32_t ring, end;  // end of the barriers
    QPN_DEVICE Turn(uint32_t rings, uint32_t barriers, int32_t pair)
        : slot(rings + pair * (kAhead * kSlotBytes)),
          full(barriers + pair * (kAhead * 16)),
          ring(slot),
          end(full + kAhead * 16) {}
    QPN_DEVICE void next() {
        slot += kSlotBytes;
        full += 16;
        if (full == end) slot = ring, full -= kAhead * 16, parity ^= 1;
    }
    QPN_DEVICE void wait_full() const { wait_at(full, parity); }
    QPN_DEVICE void wait_empty() const { wait_at(full + 8, parity ^ 1); }
    QPN_DEVICE void give_back(int lane) const {
        __syncwarp();
        if (lane == 0) arrive_at(full + 8);
    }
};

// Opens the barriers of all rings: `arrivals` fill a slot, one empties it. `show_barriers` follows.
template <int kSlots>
QPN_DEVICE void open_rings(uint32_t barriers, uint32_t arrivals) {
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * kSlots; i += kPairThreads)
        open_barrier(barriers + i * 8, i % 2 == 0 ? arrivals : 1);
}

// Part of a run of chunks that one warp multiplies, and another copies.
struct Share {
    int32_t begin, end;  // chunks of the run
    int32_t number;      // tile or expert that it begins in
    int32_t chunk;       // of that

    QPN_DEVICE Share(int32_t all, int32_t chunks, int32_t pair) {
        begin = all * pair / kPairs;
        end = all * (pair + 1) / kPairs;
        number = uint32_t(begin) / uint32_t(chunks);
        chunk = begin - number * chunks;
    }
    // Of tile or expert `other`, which has chunks as many.
    QPN_DEVICE bool touches(int32_t other, int32_t chunks) const {
        const int32_t first = other * chunks;
        return begin < first + chunks && end > first && begin < end;
    }
};

// Partial sums of a warp: of `many` tiles or experts of a run, that its share can touch.
QPN_BOTH int32_t partials_of(int32_t many) { return (many + kPairs - 1) / kPairs + 1; }

}  // namespace qpn
