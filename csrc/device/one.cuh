// The kernel of one token. It is launched twice: for W13 with SwiGLU, then for W2 with the weighted
// sum.
//
// What a block has to read is one run of chunks, tile after tile (W13) or expert after expert (W2).
// Half of its warps multiply: each takes one part of the run and leaves a partial sum for every
// tile or expert that it touches. Each of the others copies for one of them, by a ring of kAhead
// chunks in shared memory. Once all sums are there, all warps add them up.
#pragma once
#include "closing.cuh"
#include "one_run.cuh"
#include "single.cuh"

namespace qpn {

template <class F, int kAhead, bool kFirst>
QPN_DEVICE void copy_share(Turn<F::kBytes, kAhead> turn, const OneStep& step, const Chosen& chosen,
                           const Run<kFirst>& run, const Share& share, int lane) {
    const Bank& bank = step.bank;
    int32_t chunk = share.chunk, expert, tile;
    run.place(step, share.number, expert, tile);
    SingleTile source;
    bool aimed = false;
#pragma unroll 1
    for (int32_t left = share.end - share.begin; left > 0; --left) {
        if (!aimed) source.at(bank, chosen.slot_of(expert), tile, chunk, lane);
        aimed = true;
        turn.wait_empty();
        F::copy(turn.slot, turn.full, bank, source, lane);
        turn.next();
        source.advance();
        if (++chunk < run.chunks) continue;
        chunk = 0;
        aimed = false;
        if (kFirst && ++tile < bank.tiles) continue;
        if (kFirst) tile = 0;
        ++expert;
    }
}

// `row` has the digits and notes of the row that the share begins in; those of the next expert
// follow `row_bytes` later.
template <class F, int kAhead, bool kFirst>
QPN_DEVICE void multiply_share(Turn<F::kBytes, kAhead> turn, const OneStep& step,
                               const Run<kFirst>& run, const Share& share, const OneLayout& at,
                               uint32_t base, uint32_t row, int32_t row_bytes, int32_t warp,
                               int lane) {
    const SingleLane map(lane);
    const Bytes<F::kKind> bytes{};
    int32_t left = share.end - share.begin, chunk = share.chunk;
    uint32_t digits = map.brings ? row + map.digits + chunk * kDigitBytes : base + at.zeros;
    uint32_t notes = row + at.notes + (chunk * kChunkBlocks + lane % 4) * kNoteBytes;
    uint32_t part = base + at.part + warp * step.partials * (kTile * 4);
    float total[4] = {};
#pragma unroll 1
    while (left > 0) {
        turn.wait_full();
        F::consume(total, turn.slot, step.bank, digits, notes, map, bytes);
        turn.give_back(lane);
        turn.next();
        digits += map.brings & kDigitBytes;
        notes += kChunkBlocks * kNoteBytes;
        --left;
        if (++chunk < run.chunks && left > 0) continue;
        digits += map.brings & (row_bytes - chunk * kDigitBytes);
        notes += row_bytes - chunk * (kChunkBlocks * kNoteBytes);
        chunk = 0;
        F::store(total, part, lane);
        part += kTile * 4;
#pragma unroll
        for (int c = 0; c < 4; ++c) total[c] = 0.0f;
    }
}

// What the warps have left for one tile or expert: lane w finds where that of warp w lies.
template <bool kFirst>
QPN_DEVICE uint32_t find_parts(const OneStep& step, const Run<kFirst>& run, const OneLayout& at,
                               uint32_t base, int32_t number, int lane) {
    const Share share(run.all, run.chunks, lane % kPairs);
    const int32_t place = lane % kPairs * step.partials + number - share.number;
    return pinned(base +
                  (share.touches(number, run.chunks) ? at.part + place * (kTile * 4) : at.zeros));
}
QPN_DEVICE float sum_parts(uint32_t from, int lane) {
    float each[kPairs], sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kPairs; ++w)
        each[w] = read_float(__shfl_sync(0xffffffffu, from, w) + lane * 4);
#pragma unroll
    for (int w = 0; w < kPairs; ++w) sum += each[w];
    return sum;
}

// The token's activations as digits, by the warps that multiply.
template <class F>
QPN_DEVICE void stage_token(const OneStep& step, const OneLayout& at, uint32_t row) {
    const int32_t vectors = step.bank.chunks() * (kChunkRows / 8);
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < (vectors + 31) / 32 * 32; i += kMultiplyThreads) {
        Vector v{0, 0, 0, 0};
        if (i * 8 < step.bank.k) v = load_activations(step.x + i * 8);
        stage_digits<typename F::Act, F::kKind>(row, row + at.notes, i, vectors, v);
    }
}

// The rows that W13 has left, by the warps that multiply.
QPN_DEVICE void take_rows(const OneStep& step, int32_t bytes, uint32_t to, uint32_t barrier) {
    if (bytes == 0) return;
#if QPN_ARCH >= 900
    if (threadIdx.x == 0) {
        fence_bulk();
        expect_bytes(barrier, bytes);
        copy_bulk(to, step.hidden, bytes, barrier);
    }
    wait_at(barrier, 0);
#else
    for (int32_t i = threadIdx.x * 16; i < bytes; i += kMultiplyThreads * 16)
        copy_async<16>(to + i, step.hidden + i);
    close_copies();
    wait_for_copies<0>();
    sync_warps(1, kMultiplyThreads);
#endif
}

// SwiGLU of a tile of W13, in lanes by columns: a segment of a row of `hidden`.
template <class F>
QPN_DEVICE void give_tile(const OneStep& step, int32_t expert, int32_t tile, float value,
                          int lane) {
    using Act = typename F::Act;
    const float gate = __shfl_sync(0xffffffffu, value, lane & ~1);
    const float up = __shfl_sync(0xffffffffu, value, lane | 1);
    const float silu = __fdividef(gate, 1.0f + __expf(-gate));
    uint8_t* row = step.hidden + int64_t(expert) * (step.hidden_chunks * kDigitRowBytes);
    give_digits<F::kKind>(row, step.hidden_chunks, tile, rounded<Act>(silu * up), lane);
    if (tile + 1 == step.bank.tiles) end_row(row, step.hidden_chunks, tile + 1, lane);
}

// Adds up what is left for each number of the run and gives it on: W13 to `hidden`, W2 to
// `results`.
template <class F, bool kFirst>
QPN_DEVICE void finish(const OneStep& step, const Chosen& chosen, const Run<kFirst>& run,
                       const OneLayout& at, uint32_t base, uint32_t parts, int32_t warp, int lane) {
#pragma unroll 1
    for (int32_t number = warp; number < run.count;) {
        int32_t expert, tile;
        run.place(step, number, expert, tile);
        const float sum = apply_global(step.bank, chosen.slot_of(expert), tile * kTile + lane,
                                       sum_parts(parts, lane));
        const float value = rounded<typename F::Act>(sum);
        if (kFirst)
            give_tile<F>(step, expert, tile, value, lane);
        else
            write_word(base + at.results + (number * kTile + lane) * 4, __float_as_uint(value));
        number += kPairWarps;
        if (number < run.count) parts = find_parts(step, run, at, base, number, lane);
    }
}

template <class F, int kAhead, bool kFirst>
QPN_DEVICE void one_token(const OneStep& step) {
    using Act = typename F::Act;
    extern __shared__ uint4 shared[];
    const int32_t lane = threadIdx.x % 32;
    const int32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), pair = warp % kPairs;
    const OneLayout at(step.bank.chunks(), kFirst ? 1 : step.top_k, step.partials, kAhead,
                       F::kBytes);
    const uint32_t base = shared_address(shared), rows = base + at.rows;
    int64_t id = 0;
    // What the router chose is there once the launch before W13 has ended: W13 waits for that, and
    // W2 starts after it did.
    if (!kFirst) id = Chosen::id_of(step, lane);
    // Each lane's copies arrive at a slot, and so do the bytes that one lane expects.
    open_rings<kPairs * kAhead>(base + at.barriers, QPN_ARCH >= 900 ? 33 : 32);
    const uint32_t rows_there = base + at.barriers + kPairs * kAhead * 16;
    if (threadIdx.x == 0) open_barrier(rows_there, 1);
    show_barriers();
    if (threadIdx.x < kTile) write_word(base + at.zeros + threadIdx.x * 4, 0);
    if (kFirst && threadIdx.x < 32) {
        prefetch_line(step.ids);
        prefetch_line(step.weights);
        prefetch_line(step.expert_map + min(lane * 32, step.experts - 1));
    }
    __syncthreads();
    if (kFirst) wait_for_launch_before();
    let_next_launch_start();
    if (kFirst) id = Chosen::id_of(step, lane);
    if (kFirst && warp < kPairs) stage_token<F>(step, at, rows);

    const Chosen chosen(step, id, lane);
    const Run<kFirst> run(step, chosen);
    const Share share(run.all, run.chunks, pair);
    const Turn<F::kBytes, kAhead> turn(base, base + at.barriers, pair);
    const uint32_t parts = find_parts(step, run, at, base, warp, lane);
    if (warp >= kPairs) {
        copy_share<F, kAhead>(turn, step, chosen, run, share, lane);
        if (!kFirst && warp == kPairs && lane < chosen.count)
            write_word(base + at.shares + lane * 4,
                       __float_as_uint(router_weight(step.weights, step.weight_dtype, chosen.row)));
    } else {
        if (kFirst) {
            sync_warps(1, kMultiplyThreads);
        } else {
            wait_for_launch_before();
            take_rows(step, chosen.count * at.row, rows, rows_there);
        }
        multiply_share<F, kAhead>(turn, step, run, share, at, base,
                                  kFirst ? rows : rows + share.number * at.row, kFirst ? 0 : at.row,
                                  warp, lane);
    }
    __syncthreads();
    finish<F>(step, chosen, run, at, base, parts, warp, lane);
    if (kFirst) return;
    __syncthreads();
    if (warp != 0) return;
    float sum = 0.0f;
#pragma unroll 2
    for (int32_t i = 0; i < chosen.count; ++i)
        sum = fmaf(read_float(base + at.shares + i * 4),
                   read_float(base + at.results + (i * kTile + lane) * 4), sum);
    const int32_t column = blockIdx.x * kTile + lane;
    if (column < step.bank.n) step.out[column] = uint16_t(Act::from_float(sum));
}

}  // namespace qpn
