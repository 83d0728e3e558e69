// What is wrong in the payload of one layer, counted where it is found.
#pragma once
#include "layout.cuh"

namespace qpn {
inline namespace conversion {

// What was found wrong of one kind in one tensor; `rank` grows towards the first in row-major order.
struct Spot {
    unsigned long long count, rank;
    long long bits;
    int lock, reserved;
};
static_assert(sizeof(Spot) == 32, "SPOT of loader/spots.py");

// Formats that the scales of a bank can have while they arrive in 32 bits: see formats.cuh.
enum Format : int { kInFp16 = 0, kTurning = 1, kInBf16 = 2 };

// Head of the table of one layer; its spots follow.
struct Tally {
    unsigned long long count;  // of everything that was found
    int format[2];             // Format of each bank
    long long reserved[2];
    QPN_BOTH Spot* spots() { return reinterpret_cast<Spot*>(this + 1); }
};
static_assert(sizeof(Tally) == sizeof(Spot), "the table is an array of spots to loader/spots.py");

// Kind x projection x slot for pieces; then bank x slot for the closing pass.
constexpr int64_t kPieceKinds = 8, kProjections = 3;
QPN_BOTH int64_t tally_bytes(int64_t experts) {
    return (1 + (kPieceKinds * kProjections + 2) * experts) * static_cast<int64_t>(sizeof(Spot));
}
QPN_BOTH int64_t spot_of(int64_t kind, int64_t projection, int64_t slot, int64_t experts) {
    return (kind * kProjections + projection) * experts + slot;
}
QPN_BOTH int64_t closing_spot_of(int64_t bank, int64_t slot, int64_t experts) {
    return (kPieceKinds * kProjections + bank) * experts + slot;
}

QPN_BOTH unsigned long long rank_of(int64_t row, int64_t column) {
    return ~(static_cast<unsigned long long>(row) << 32 | static_cast<unsigned long long>(column));
}

// `count` values, the first of which has that rank and those bits.
QPN_BOTH void hit(Tally* tally, int64_t at, unsigned long long count, unsigned long long rank,
                  int64_t bits) {
    Spot& spot = tally->spots()[at];
#ifdef __CUDA_ARCH__
    atomicAdd(&tally->count, count);
    atomicAdd(&spot.count, count);
    volatile unsigned long long* best = &spot.rank;
    for (bool settled = rank <= *best; !settled;)
        if (atomicCAS(&spot.lock, 0, 1) == 0) {
            __threadfence();
            if (rank > *best) {
                *best = rank;
                *static_cast<volatile long long*>(&spot.bits) = bits;
            }
            __threadfence();
            atomicExch(&spot.lock, 0);
            settled = true;
        }
#else
    tally->count += count;
    spot.count += count;
    if (rank > spot.rank) spot.rank = rank, spot.bits = bits;
#endif
}

}  // namespace conversion
}  // namespace qpn
