// The decode kernels of the m16n8k16 family for several tokens: W13 with SwiGLU, then W2.
//
// A warp takes chunks of 128 rows of one tile of 32 columns; warps that share a tile split its K
// and meet in shared memory. Each warp has a ring of kAhead chunks there: copies run ahead of the
// products, across tiles and experts, so that the memory has no pause where one tile ends.
#pragma once
#include "access.cuh"
#include "m16.cuh"
#include "closing.cuh"

namespace qpn {

// Several tokens: one pass is up to eight rows of one expert; a block takes a run of (pass, group
// of tiles) pairs. W13 gives `hidden`, W2 gives `y`, which `sum_rows` adds up.
template <class F, int kWarps, int kAhead, bool kFirst>
QPN_DEVICE void of_passes(const Step& step) {
    using Act = typename F::Act;
    extern __shared__ uint4 shared[];
    const Bank& bank = kFirst ? step.w13 : step.w2;
    const int32_t lane = pinned(threadIdx.x % 32), warp = pinned(threadIdx.x / 32);
    const int32_t all_rows = step.tokens * step.top_k;
    const PassLayout at(kWarps, step.w13.experts, all_rows, 0);
    const uint32_t base = pinned(shared_address(shared));
    const LaneMap map(lane);
    const uint32_t ring = pinned(base + at.ring + warp * (kAhead * F::S::kBytes));
    prefetch_routing(step);
    if (kFirst) wait_for_launch_before();
    let_next_launch_start();
    Routing routing(reinterpret_cast<int32_t*>(shared) + at.routing / 4, step.w13.experts,
                    all_rows);
    compact_rows(routing, step, whole_block());

    const int32_t splits = kFirst ? step.splits13 : step.splits2, abreast = kWarps / splits;
    const int32_t runs = (bank.tiles + abreast - 1) / abreast;
    const int32_t chunks = bank.chunks(), each = (chunks + splits - 1) / splits;
    const int64_t tasks = int64_t(*routing.passes) * runs;
    const int32_t begin = int32_t(tasks * blockIdx.x / gridDim.x);
    const int32_t end = int32_t(tasks * (blockIdx.x + 1) / gridDim.x);
    const int32_t my_tile = warp / splits, my_split = warp % splits;
    int32_t copy_left = end - begin, copy_pass = begin / runs, copy_run = begin % runs, copy_at = 0;
    Tile source;
    const auto aim = [&] {
        if (copy_left > 0)
            source.at(bank, routing.pass_slot[copy_pass], copy_run * abreast + my_tile, my_split,
                      lane);
    };
    aim();
    uint32_t copy_slot = ring;
    const auto copy = [&] {
        if (copy_left > 0) {
            F::copy(copy_slot, bank, source, map, lane);
            source.advance(splits);
            if (++copy_at == each) {
                copy_at = 0;
                --copy_left;
                if (++copy_run == runs) copy_run = 0, ++copy_pass;
                aim();
            }
        }
        close_copies();
        copy_slot += F::S::kBytes;
        if (copy_slot == ring + kAhead * F::S::kBytes) copy_slot = ring;
    };
#pragma unroll 1
    for (int d = 0; d < kAhead - 1; ++d) copy();
    if (!kFirst) wait_for_launch_before();

    int32_t pass = begin / runs, run = begin % runs, turn = 0;
    uint32_t slot = ring;
    const uint16_t* row = begin < end ? input_of<kFirst>(step, routing, pass, lane / 4) : nullptr;
    typename F::Total total;
    F::clear(total);
#pragma unroll 1
    for (int32_t left = end - begin, done = 0; left > 0;) {
        const int32_t chunk = my_split + done * splits;
        Vector x[kChunkBlocks];
        F::load_x(x, bank, row, chunk, lane);
        wait_for_copies<kAhead - 2>();
        __syncwarp();
        copy();
        if (chunk < chunks) F::consume(total, slot, bank, x, map, lane);
        slot += F::S::kBytes;
        if (slot == ring + kAhead * F::S::kBytes) slot = ring;
        if (++done < each) continue;
        done = 0;
        const int32_t rows = routing.pass_rows[pass] & 15;
        const uint32_t part = base + at.part + turn * (kWarps * kPassRows * kPitch * 4);
        F::store(total, part + warp * (kPassRows * kPitch * 4), rows, lane);
        F::clear(total);
        if (splits > 1)
            __syncthreads();
        else
            __syncwarp();
        add_up<Act, kFirst>(step, routing, pass, run * abreast, abreast, splits, part, kWarps);
        turn ^= 1;
        --left;
        if (++run < runs) continue;
        run = 0;
        if (left > 0) row = input_of<kFirst>(step, routing, ++pass, lane / 4);
    }
}

}  // namespace qpn
