// The threads of a block that do something together: all of them, or some whole warps.
#pragma once
#include "barrier.cuh"

namespace qpn {

struct Crew {
    int32_t thread, threads;  // this one of so many
    int32_t barrier;          // that only they use

    QPN_DEVICE void sync() const { sync_warps(barrier, threads); }
};
QPN_DEVICE Crew whole_block() { return {int32_t(threadIdx.x), int32_t(blockDim.x), 0}; }

// Sum of the numbers of all threads before this one; `all` is the sum of all. At most 32 warps,
// each with a place in `totals`.
QPN_DEVICE int32_t sum_before(int32_t mine, int32_t* totals, int32_t& all, const Crew& crew) {
    const int32_t lane = crew.thread % 32, warp = crew.thread / 32;
    int32_t before = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, before, d);
        if (lane >= d) before += other;
    }
    crew.sync();  // the totals of the sum before have been read
    if (lane == 31) totals[warp] = before;
    crew.sync();
    before -= mine;
    all = 0;
    for (int32_t w = 0; w < crew.threads / 32; ++w) {
        if (w == warp) before += all;
        all += totals[w];
    }
    return before;
}

}  // namespace qpn
