// The kernels of SM80 and newer for several tokens: W13 with SwiGLU, then W2.
//
// A block takes a run of (pass, tile) pairs, a pass being up to eight rows of one expert. Tiles of
// one pass make a segment: its rows are staged in shared memory (all tokens are, once, where W13
// has no more than eight), its chunks are shared out among the warps that multiply, which leave a
// partial sum for each tile that they touch. Half of the block's warps only copy, each for one of
// the others and ahead of it, across segments: so the memory has no pause where a tile, an expert
// or a step of the products ends.
#pragma once
#include "closing.cuh"
#include "digit_rows.cuh"

namespace qpn {

constexpr int kGroupedAhead = 3;                                // chunks of a ring
constexpr int kRowBytes = kPitch * 4;                           // a row of partial sums
constexpr int kPartBytes = 2 * kPairs * kPassRows * kRowBytes;  // partial sums of a segment

// Shared memory of a block, in bytes from its start, where the rings are.
struct GroupedLayout {
    int32_t rows, part, barriers, routing, bytes;
    QPN_BOTH GroupedLayout(int32_t chunks, int64_t slots, int64_t all_rows, int32_t slot_bytes,
                           int32_t note_bytes) {
        rows = kPairs * kGroupedAhead * slot_bytes;
        part = rows + StagedLayout(chunks, note_bytes).bytes;
        barriers = part + kPartBytes;
        routing = barriers + kPairs * kGroupedAhead * 16;
        bytes = routing + int32_t((Routing::ints(slots, all_rows) * 4 + 15) / 16 * 16);
    }
};

// What a block has to do: pairs of (pass, tile), tiles first.
struct Tasks {
    int64_t next, end;
    QPN_DEVICE Tasks(const Routing& routing, int32_t tiles) {
        const int64_t all = int64_t(*routing.passes) * tiles;
        next = all * blockIdx.x / gridDim.x;
        end = all * (blockIdx.x + 1) / gridDim.x;
    }
};

// Tiles of one pass, one after the other.
struct Segment {
    int32_t pass, tile, count, rows, slot;

    // The next of `tasks`: as many tiles as there is room for sums.
    QPN_DEVICE Segment(const Routing& routing, int32_t tiles, const Tasks& tasks) {
        pass = int32_t(uint32_t(tasks.next) / uint32_t(tiles));
        tile = int32_t(tasks.next) - pass * tiles;
        rows = routing.pass_rows[pass] & 15;
        slot = routing.pass_slot[pass];
        const int32_t room = (kPartBytes / (kPairs * kRowBytes) / rows - 1) * kPairs;
        count = int32_t(min(tasks.end - tasks.next, int64_t(min(tiles - tile, room))));
    }
};

template <class F>
using GroupedTurn = Turn<F::S::kBytes, kGroupedAhead>;

template <class F>
QPN_DEVICE void copy_segment(GroupedTurn<F>& turn, const Bank& bank, const Segment& segment,
                             const Share& share, const LaneMap& map, int lane) {
    Tile source;
    int32_t tile = segment.tile + share.number, chunk = share.chunk;
    bool aimed = false;
#pragma unroll 1
    for (int32_t left = share.end - share.begin; left > 0; --left) {
        if (!aimed) source.at(bank, segment.slot, tile, chunk, lane);
        aimed = true;
        turn.wait_empty();
        F::copy(turn.slot, bank, source, map, lane);
        copies_arrive(turn.full);
        turn.next();
        source.advance(1);
        if (++chunk < bank.chunks()) continue;
        chunk = 0;
        aimed = false;
        ++tile;
    }
}

// `kUsed`: tiles of B that the rows fill.
template <class F, int kUsed>
QPN_DEVICE void multiply_tiles(GroupedTurn<F>& turn, const Bank& bank, int32_t rows,
                               const Share& share, const typename F::Rows& from, uint32_t part,
                               const LaneMap& map, int lane) {
    int32_t chunk = share.chunk;
    float total[kUsed][4];
    F::clear(total);
#pragma unroll 1
    for (int32_t left = share.end - share.begin; left > 0;) {
        turn.wait_full();
        F::consume(total, turn.slot, bank, from, chunk, map);
        turn.give_back(lane);
        turn.next();
        --left;
        if (++chunk < bank.chunks() && left > 0) continue;
        chunk = 0;
        F::store(total, part, rows, lane);
        F::clear(total);
        part += rows * kRowBytes;
    }
}

template <class F>
QPN_DEVICE void multiply_segment(GroupedTurn<F>& turn, const Bank& bank, int32_t rows,
                                 const Share& share, const typename F::Rows& from, uint32_t part,
                                 const LaneMap& map, int lane) {
    if (rows <= F::kTileRows)
        multiply_tiles<F, 1>(turn, bank, rows, share, from, part, map, lane);
    else
        multiply_tiles<F, F::kTiles>(turn, bank, rows, share, from, part, map, lane);
}

// Adds up what the warps have left of each row of each tile, and gives it on.
template <class Act, bool kFirst>
QPN_DEVICE void close_segment(const Step& step, const Routing& routing, const Segment& segment,
                              int32_t chunks, uint32_t part, int32_t warp, int lane) {
    const Share share(segment.count * chunks, chunks, lane % kPairs);
    const int32_t partials = partials_of(segment.count) * segment.rows;
    // Of tile 0 and row 0 by the pair `lane % kPairs`, which may not have it.
    const uint32_t first =
        part + (lane % kPairs * partials - share.number * segment.rows) * kRowBytes;
    for (int32_t i = warp; i < segment.count * segment.rows; i += kPairs) {
        const int32_t tile = uint32_t(i) / uint32_t(segment.rows), number = i - tile * segment.rows;
        uint32_t with =
            __ballot_sync(0xffffffffu, share.touches(tile, chunks)) & ((1u << kPairs) - 1);
        float sum = 0.0f;
        for (; with != 0; with &= with - 1)
            sum += read_float(__shfl_sync(0xffffffffu, first, __ffs(with) - 1) + i * kRowBytes +
                              lane * 4);
        give<Act, kFirst>(step, routing.row_of(segment.pass, number), segment.slot,
                          (segment.tile + tile) * kTile + lane, sum);
    }
}

template <class F>
QPN_DEVICE void copy_tasks(const Bank& bank, const Routing& routing, GroupedTurn<F> turn,
                           int32_t pair, int lane) {
    const LaneMap map(lane);
    for (Tasks tasks(routing, bank.tiles); tasks.next < tasks.end;) {
        const Segment segment(routing, bank.tiles, tasks);
        const Share share(segment.count * bank.chunks(), bank.chunks(), pair);
        copy_segment<F>(turn, bank, segment, share, map, lane);
        tasks.next += segment.count;
    }
}

// `by_token`: all tokens are staged already.
template <class Act, class F, bool kFirst>
QPN_DEVICE void multiply_tasks(const Step& step, const Routing& routing, GroupedTurn<F> turn,
                               uint32_t rows, uint32_t part, bool by_token, int32_t warp,
                               int lane) {
    const Bank& bank = kFirst ? step.w13 : step.w2;
    const int32_t chunks = bank.chunks();
    const StagedLayout staged(chunks, F::Sums::kNote);
    const LaneMap map(lane);
    int32_t staged_pass = -1;
    for (Tasks tasks(routing, bank.tiles); tasks.next < tasks.end;) {
        const Segment segment(routing, bank.tiles, tasks);
        const Share share(segment.count * chunks, chunks, warp);
        if (!by_token && segment.pass != staged_pass)
            stage_rows<Act, typename F::Sums>(
                rows, staged, segment.rows, chunks, bank.k, [&](int32_t number) {
                    return input_of<kFirst>(step, routing, segment.pass, number);
                });
        staged_pass = segment.pass;
        sync_warps(1, kMultiplyThreads);
        const typename F::Rows own(rows, staged, segment.rows, lane, [&](int32_t number) {
            return by_token ? routing.row_of(segment.pass, number) / step.top_k : number;
        });
        multiply_segment<F>(turn, bank, segment.rows, share, own,
                            part + warp * partials_of(segment.count) * segment.rows * kRowBytes,
                            map, lane);
        sync_warps(1, kMultiplyThreads);
        close_segment<Act, kFirst>(step, routing, segment, chunks, part, warp, lane);
        tasks.next += segment.count;
    }
}

template <class Act, class F, bool kFirst>
QPN_DEVICE void of_segments(const Step& step) {
    extern __shared__ uint4 shared[];
    const Bank& bank = kFirst ? step.w13 : step.w2;
    const int32_t lane = pinned(threadIdx.x % 32), chunks = bank.chunks();
    const int32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), pair = warp % kPairs;
    const int32_t all_rows = step.tokens * step.top_k;
    const GroupedLayout at(chunks, step.w13.experts, all_rows, F::S::kBytes, F::Sums::kNote);
    const uint32_t base = pinned(shared_address(shared)), rows = base + at.rows;
    prefetch_routing(step);
    open_rings<kPairs * kGroupedAhead>(base + at.barriers, 32);
    show_barriers();
    if (threadIdx.x < kZeroBytes / 4) write_word(rows + threadIdx.x * 4, 0);
    if (kFirst) wait_for_launch_before();
    let_next_launch_start();
    Routing routing(reinterpret_cast<int32_t*>(shared) + at.routing / 4, step.w13.experts,
                    all_rows);
    const bool by_token = kFirst && step.tokens <= kPassRows;
    if (warp >= kPairs)
        compact_rows(routing, step, {int32_t(threadIdx.x) - kMultiplyThreads, kPairs * 32, 2});
    else if (by_token)
        stage_rows<Act, typename F::Sums>(
            rows, StagedLayout(chunks, F::Sums::kNote), step.tokens, chunks, bank.k,
            [&](int32_t token) { return step.x + int64_t(token) * bank.k; });
    __syncthreads();

    const GroupedTurn<F> turn(base, base + at.barriers, pair);
    if (warp >= kPairs) {
        copy_tasks<F>(bank, routing, turn, pair, lane);
    } else {
        if (!kFirst) wait_for_launch_before();
        multiply_tasks<Act, F, kFirst>(step, routing, turn, rows, base + at.part, by_token, warp,
                                       lane);
    }
}

}  // namespace qpn
