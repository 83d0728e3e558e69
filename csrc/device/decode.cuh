// The decode kernels of the m16n8k16 family: W13 with SwiGLU, then W2 with the weighted sum.
//
// A warp takes chunks of 128 rows of one tile of 32 columns; warps that share a tile split its K
// and meet in shared memory. Each warp has a ring of kAhead chunks there: copies run ahead of the
// products, across tiles and experts, so that the memory has no pause where one tile ends.
#pragma once
#include "access.cuh"
#include "m16.cuh"
#include "closing.cuh"

namespace qpn {

// Shared memory of the kernels for one token, in bytes from its start. Chunks of x are staged in
// pairs, so that whole warps do it.
struct OneLayout {
    int32_t row;  // one staged row: numbers, then sums of segments
    int32_t sums, blank, part, ring, bytes;

    QPN_BOTH OneLayout(int32_t chunks, int32_t rows, int32_t parts, int32_t ring_bytes) {
        const int32_t even = (chunks + 1) / 2 * 2;
        sums = even * kChunkRows * 2;
        row = sums + even * (kChunkRows / kSegmentRows) * 4;
        blank = rows * row;
        part = blank + 16;
        ring = part + (parts * kPitch * 4 + 15) / 16 * 16;
        bytes = ring + ring_bytes;
    }
};

// Rows of activations of `count` numbers each to shared memory, by all threads: loads of a turn
// first, so that they wait for the memory together.
template <class F, int kThreads, class From>
QPN_DEVICE void stage_rows(uint32_t to, const OneLayout& at, const From& from, int32_t rows,
                           int32_t count) {
    constexpr int kTurn = 4;
    const int32_t each = at.sums / 16,
                  all = rows * each;  // both multiples of 32: whole warps take part
    for (int32_t first = threadIdx.x; first < all; first += kTurn * kThreads) {
        Vector v[kTurn];
#pragma unroll
        for (int t = 0; t < kTurn; ++t) {
            const int32_t i = first + t * kThreads, row = i / each, vector = i - row * each;
            v[t] = Vector{0, 0, 0, 0};
            if (i < all && vector * 8 < count) v[t] = load_activations(from(row) + vector * 8);
        }
#pragma unroll
        for (int t = 0; t < kTurn; ++t) {
            const int32_t i = first + t * kThreads, row = i / each;
            if (i < all)
                F::stage(to + row * at.row, to + row * at.row + at.sums, i - row * each, v[t]);
        }
    }
}

// One token: W13 and SwiGLU of its experts in router order.
template <class F, int kWarps, int kAhead>
QPN_DEVICE void first_of_one(const Step& step) {
    using Act = typename F::Act;
    extern __shared__ uint4 shared[];
    __shared__ int32_t slots[kMostSelected];
    const Bank& bank = step.w13;
    const int32_t lane = pinned(threadIdx.x % 32), warp = pinned(threadIdx.x / 32);
    const int32_t chunks = bank.chunks(), each = (chunks + kWarps - 1) / kWarps;
    const OneLayout at(chunks, 1, 2 * kWarps, 0);
    const uint32_t base = pinned(shared_address(shared));
    const LaneMap map(lane);
    const uint32_t ring = pinned(base + at.ring + warp * (kAhead * F::S::kBytes));
    const uint32_t blank = pinned(base + at.blank);
    prefetch_routing(step);
    wait_for_launch_before();
    let_next_launch_start();
    if (threadIdx.x < step.top_k) slots[threadIdx.x] = slot_of_row(step, threadIdx.x);
    stage_rows<F, kWarps * 32>(base, at, [&](int32_t) { return step.x; }, 1, bank.k);
    if (threadIdx.x == 0) write_vector(base + at.blank, Vector{0, 0, 0, 0});
    __syncthreads();

    const int32_t tiles = bank.tiles, jump = gridDim.x / tiles, skip = gridDim.x % tiles;
    const auto settle = [&](int32_t& expert, int32_t& tile) {
        while (expert < step.top_k && slots[expert] < 0) {
            expert += jump, tile += skip;
            if (tile >= tiles) tile -= tiles, ++expert;
        }
    };
    const auto next = [&](int32_t& expert, int32_t& tile) {
        expert += jump, tile += skip;
        if (tile >= tiles) tile -= tiles, ++expert;
        settle(expert, tile);
    };
    int32_t copy_expert = blockIdx.x / tiles, copy_tile = blockIdx.x % tiles, copy_at = 0;
    settle(copy_expert, copy_tile);
    int32_t expert = copy_expert, tile = copy_tile;
    Tile source;
    if (expert < step.top_k) source.at(bank, slots[expert], tile, warp, lane);
    uint32_t copy_slot = ring;
    const auto copy = [&] {
        if (copy_expert < step.top_k) {
            F::copy(copy_slot, bank, source, map, lane);
            source.advance(kWarps);
            if (++copy_at == each) {
                copy_at = 0;
                next(copy_expert, copy_tile);
                if (copy_expert < step.top_k)
                    source.at(bank, slots[copy_expert], copy_tile, warp, lane);
            }
        }
        close_copies();
        copy_slot += F::S::kBytes;
        if (copy_slot == ring + kAhead * F::S::kBytes) copy_slot = ring;
    };
#pragma unroll 1
    for (int d = 0; d < kAhead - 1; ++d) copy();

    uint32_t slot = ring, part = base + at.part;
    int32_t turn = 0;
    float total[4] = {};
#pragma unroll 1
    for (int32_t done = 0; expert < step.top_k;) {
        wait_for_copies<kAhead - 2>();
        __syncwarp();
        copy();
        const int32_t chunk = warp + done * kWarps;
        if (chunk < chunks)
            F::consume(total, slot, bank, base, blank, base + at.sums, chunk, map, lane);
        slot += F::S::kBytes;
        if (slot == ring + kAhead * F::S::kBytes) slot = ring;
        if (++done < each) continue;
        done = 0;
        F::store(total, part + warp * (kPitch * 4), 0, lane);
        __syncthreads();
        if (warp == turn) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) sum += read_float(part + (w * kPitch + lane) * 4);
            give_hidden<Act>(step, expert, slots[expert], tile * kTile + lane, sum);
        }
        if (++turn == kWarps) turn = 0;
        part = 2 * (base + at.part) + kWarps * kPitch * 4 - part;
#pragma unroll
        for (int c = 0; c < 4; ++c) total[c] = 0.0f;
        next(expert, tile);
    }
}

// One token: W2 of its experts and their weighted sum in router order. A cluster of blocks takes
// one tile of columns; its experts are dealt out to the blocks, and the first block adds up.
template <class F, int kWarps, int kAhead>
QPN_DEVICE void second_of_one(const Step& step) {
    using Act = typename F::Act;
    extern __shared__ uint4 shared[];
    __shared__ int32_t slots[kMostSelected];
    __shared__ float shares[kMostSelected];
    const Bank& bank = step.w2;
    const int32_t lane = pinned(threadIdx.x % 32), warp = pinned(threadIdx.x / 32);
    const int32_t size = cluster_size(), rank = cluster_rank(), splits = step.splits2;
    const int32_t tile = blockIdx.x / size;
    const int32_t mine = (step.top_k - rank + size - 1) / size;
    const int32_t chunks = bank.chunks(), each = (chunks + splits - 1) / splits;
    const OneLayout at(chunks, (step.top_k + size - 1) / size, step.top_k * splits, 0);
    const uint32_t base = pinned(shared_address(shared));
    const LaneMap map(lane);
    const uint32_t ring = pinned(base + at.ring + warp * (kAhead * F::S::kBytes));
    const uint32_t blank = pinned(base + at.blank);
    let_next_launch_start();
    if (size > 1) cluster_arrive();
    // What the router chose was there before W13 started: that launch has waited for it.
    if (threadIdx.x < step.top_k) {
        slots[threadIdx.x] = slot_of_row(step, threadIdx.x);
        shares[threadIdx.x] = router_weight(step, threadIdx.x);
    }
    if (threadIdx.x == 0) write_vector(blank, Vector{0, 0, 0, 0});
    __syncthreads();

    // Warps with one number below `splits` take one share of K; `abreast` experts go side by side.
    const int32_t split = warp % splits, abreast = kWarps / splits;
    int32_t copy_row = warp / splits, copy_at = 0;
    Tile source;
    if (copy_row < mine) source.at(bank, slots[copy_row * size + rank], tile, split, lane);
    uint32_t copy_slot = ring;
    const auto copy = [&] {
        if (copy_row < mine) {
            F::copy(copy_slot, bank, source, map, lane);
            source.advance(splits);
            if (++copy_at == each) {
                copy_at = 0;
                copy_row += abreast;
                if (copy_row < mine)
                    source.at(bank, slots[copy_row * size + rank], tile, split, lane);
            }
        }
        close_copies();
        copy_slot += F::S::kBytes;
        if (copy_slot == ring + kAhead * F::S::kBytes) copy_slot = ring;
    };
#pragma unroll 1
    for (int d = 0; d < kAhead - 1; ++d) copy();
    wait_for_launch_before();
    stage_rows<F, kWarps * 32>(
        base, at,
        [&](int32_t row) { return step.hidden + int64_t(row * size + rank) * step.hidden_pitch; },
        mine, bank.k);
    __syncthreads();

    uint32_t slot = ring;
    float total[4] = {};
    bool met = size == 1;
#pragma unroll 1
    for (int32_t row = warp / splits, done = 0; row < mine;) {
        wait_for_copies<kAhead - 2>();
        __syncwarp();
        copy();
        const uint32_t x = base + row * at.row;
        const int32_t chunk = split + done * splits;
        if (chunk < chunks && slots[row * size + rank] >= 0)
            F::consume(total, slot, bank, x, blank, x + at.sums, chunk, map, lane);
        slot += F::S::kBytes;
        if (slot == ring + kAhead * F::S::kBytes) slot = ring;
        if (++done < each) continue;
        done = 0;
        if (!met) cluster_wait();
        met = true;
        F::store(total, base + at.part + ((row * size + rank) * splits + split) * (kPitch * 4), 0,
                 lane);
#pragma unroll
        for (int c = 0; c < 4; ++c) total[c] = 0.0f;
        row += abreast;
    }
    if (size > 1) {
        if (!met) cluster_wait();
        cluster_arrive();
        if (rank != 0) return;
        cluster_wait();
    } else {
        __syncthreads();
    }
    const int32_t column = tile * kTile + lane;
    if (warp != 0 || column >= bank.n) return;
    float sum = 0.0f;
    for (int32_t j = 0; j < step.top_k; ++j) {
        if (slots[j] < 0) continue;
        float y = 0.0f;
        for (int32_t s = 0; s < splits; ++s)
            y += read_float(base + at.part + ((j * splits + s) * kPitch + lane) * 4);
        sum = fmaf(shares[j], rounded<Act>(apply_global(bank, slots[j], column, y)), sum);
    }
    step.out[column] = uint16_t(Act::from_float(sum));
}

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
    compact_rows(routing, step);

    const int32_t splits = kFirst ? step.splits13 : step.splits2, abreast = kWarps / splits;
    const int32_t runs = (bank.tiles + abreast - 1) / abreast;
    const int32_t chunks = bank.chunks(), each = (chunks + splits - 1) / splits;
    const int64_t tasks = int64_t(routing.passes) * runs;
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
