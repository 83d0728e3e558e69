// The family of SM80 and newer: weights are the A operand of m16n8k16, activations are B.
//
// Lane (g = lane / 4, t = lane % 4) takes 16 bytes of a block of 32 rows: columns 4g..4g+3 at rows
// 8t..8t+7. Rows g and g+8 of two 16-row tiles are columns (4g, 4g+1) and (4g+2, 4g+3); K is
// permuted alike in B: step s takes codes 4s..4s+3, and the lane reads x[8t..8t+7] of row g. Scales
// multiply the fp32 sums, zero points the sums of the activations over the same rows.
#pragma once
#include "codes.cuh"
#include "metadata.cuh"
#include "mma.cuh"

namespace qpn {

// A warp copies in the order of memory, whole lines at a time: lane l takes the vector of
// g = l % 8, t = l / 8. In shared memory each t is turned by two places, so that the eight vectors
// that meet in one read lie in different banks.
QPN_DEVICE int vector_place(int g, int t) { return t * 8 + ((g + 2 * t) & 7); }

// What a lane needs again and again.
struct LaneMap {
    uint32_t copies;     // bytes into a block: where it copies to
    uint32_t reads;      // bytes into a block: its operand
    uint32_t place;      // of the metadata of its columns in block t
    uint32_t float_one;  // 2^23: an integer below that as its low bits is as much more

    QPN_DEVICE explicit LaneMap(int lane) {
        const int g = lane / 4, t = lane % 4;
        copies = pinned(vector_place(lane % 8, lane / 8) * 16);
        reads = pinned(vector_place(g, t) * 16);
        place = pinned(t * 8 + g);
        float_one = pinned(0x4b000000u);
    }
};

// A chunk in shared memory: words, then the metadata of each block (of both its halves where groups
// may change between them), columns 4g..4g+3 of block t at place 8t + g.
template <int kKind, int kLayout, bool kStraddles>
struct Slot {
    static constexpr int kRaws = kStraddles ? 2 : 1;
    static constexpr int kPlaces = 32 * kRawBytes<kKind, kLayout>;  // metadata of all lanes
    static constexpr int kBytes = kChunkBytes + kRaws * kPlaces;

    static QPN_DEVICE uint32_t raw_at(uint32_t slot, int half) {
        return slot + kChunkBytes + half * kPlaces;
    }
    static QPN_DEVICE Vector words(uint32_t slot, int block, const LaneMap& map) {
        return read_vector(slot + map.reads + block * 512);
    }
    static QPN_DEVICE void raw(Raw<kKind, kLayout>& to, uint32_t slot, int half, int from) {
        read_raw(to, raw_at(slot, half), from);
    }
};

// Where a warp reads one tile of one expert, chunk by chunk.
struct Tile {
    const uint32_t* words;  // this lane's of the next chunk
    const uint8_t *plane, *second;
    uint32_t entry;   // of group 0 at the columns that this lane copies
    int32_t segment;  // first of this lane's block in the next chunk
    int32_t left;     // blocks from the next chunk's first on; 0: nothing is there

    QPN_DEVICE void at(const Bank& bank, int32_t slot, int32_t tile, int32_t chunk, int lane) {
        const int64_t expert = int64_t(slot) * bank.groups * bank.np();
        words = bank.words + bank.tile_at(slot, tile) + chunk * (kChunkBytes / 4) + lane * 4;
        plane = bank.plane + expert * bank.entry_bytes;
        second = bank.second + expert / 2;
        entry = tile * kTile + lane % 8 * 4;
        segment = (chunk * kChunkBlocks + lane / 8) * 2;
        left = slot >= 0 && tile < bank.tiles ? bank.blocks - chunk * kChunkBlocks : 0;
    }
    QPN_DEVICE void advance(int32_t chunks) {
        words += chunks * (kChunkBytes / 4);
        segment += chunks * (2 * kChunkBlocks);
        left -= chunks * kChunkBlocks;
    }
};

template <int kKind, int kLayout, bool kStraddles>
QPN_DEVICE void copy_chunk(uint32_t slot, const Bank& bank, const Tile& tile, const LaneMap& map,
                           int lane) {
    using S = Slot<kKind, kLayout, kStraddles>;
    const uint32_t to = slot + map.copies;
    if (tile.left >= kChunkBlocks) {
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i) copy_async<16>(to + i * 512, tile.words + i * 128);
    } else {
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i)
            copy_or_zero<16>(to + i * 512, tile.words + i * 128, i < tile.left);
    }
#pragma unroll
    for (int h = 0; h < S::kRaws; ++h)
        copy_raw<kKind, kLayout>(
            S::raw_at(slot, h), lane, tile.plane, tile.second,
            tile.entry + uint32_t(bank.group_of(tile.segment + h) * bank.row_entries),
            lane / 8 < tile.left);
}

template <class C>
QPN_DEVICE float with_offset(float zero) {
    return C::kOffset == 0.0f ? zero : zero + C::kOffset;
}

// Products of one block: two tiles of columns.
template <class Act>
QPN_DEVICE void block_products(const uint32_t (&p)[4][4], const Vector& b, float (&low)[4],
                               float (&high)[4]) {
    mma_16x8x16<Act>(low, p[0][0], p[1][0], p[0][1], p[1][1], b.x, b.y);
    mma_16x8x16<Act>(high, p[2][0], p[3][0], p[2][1], p[3][1], b.x, b.y);
    mma_16x8x16<Act>(low, p[0][2], p[1][2], p[0][3], p[1][3], b.z, b.w);
    mma_16x8x16<Act>(high, p[2][2], p[3][2], p[2][3], p[3][3], b.z, b.w);
}

// Sums of the activations: the same product with A all ones.
template <class Act, class C>
QPN_DEVICE void block_sums(const Vector& b, float (&sum)[4]) {
    mma_16x8x16<Act>(sum, C::kOneEven, C::kOneEven, C::kOneOdd, C::kOneOdd, b.x, b.y);
    mma_16x8x16<Act>(sum, C::kOneEven, C::kOneEven, C::kOneOdd, C::kOneOdd, b.z, b.w);
}

template <class C>
QPN_DEVICE void unpack_block(const Vector& v, uint32_t (&p)[4][4]) {
    C::pairs(v.x, p[0]);
    C::pairs(v.y, p[1]);
    C::pairs(v.z, p[2]);
    C::pairs(v.w, p[3]);
}

// e2m1 with scales of 16 rows: both multiplied into A, which is exact (six significant bits at
// most), so that nothing has to be scaled between groups.
template <class Act>
QPN_DEVICE void scaled_products(const Vector& v, uint32_t scales, const Vector& b, float (&low)[4],
                                float (&high)[4]) {
    uint32_t p[4][4], pair[2];
    unpack_block<Codes<Act, kE2m1>>(v, p);
    e4m3_to_half2(scales, pair[0], pair[1]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const uint32_t both = Act::from_half2(prmt(pair[c / 2], 0, c % 2 ? 0x3232u : 0x1010u));
#pragma unroll
        for (int i = 0; i < 4; ++i) p[c][i] = Act::product(p[c][i], both);
    }
    block_products<Act>(p, b, low, high);
}

// `fused_bias`: the weights themselves, each rounded as an fp16 fma rounds. bf16 cannot hold one,
// two bf16 can: their products are added.
template <class Act, int kLayout>
QPN_DEVICE void fused_products(const Vector& v, const Raw<kInt4, kLayout>& raw, const Bank& bank,
                               const Vector& b, float (&low)[4], float (&high)[4]) {
    uint32_t scale2[4], bias2[4], p[4][4];
    decode_fused<kLayout>(raw, bank, scale2, bias2);
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) fused_pairs(w[c], scale2[c], bias2[c], p[c]);
    if constexpr (Act::kBf16) {
        uint32_t rest[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            split_half2(p[i / 4][i % 4], p[i / 4][i % 4], rest[i / 4][i % 4]);
        block_products<Act>(rest, b, low, high);
    }
    block_products<Act>(p, b, low, high);
}

// Up to eight rows, one for each column of B. `kFlush` blocks lie in one group (4, 1), or none does
// for sure (0): then the halves of a block are multiplied apart, half of B blank.
template <class ActT, int kKind, int kLayout, int kFlush, bool kFused>
struct Rows {
    using Act = ActT;
    using C = Codes<Act, kKind>;
    static constexpr bool kStraddles = kFlush == 0 || kFused;
    using S = Slot<kKind, kLayout, kStraddles>;
    static constexpr bool kSums = C::kZeros && !kFused;
    static constexpr bool kScaled = kKind == kE2m1 && kLayout == kCompact;
    struct Total {
        float v[4][2];
    };
    struct Sums {
        float low[4], high[4], sum[4];
        QPN_DEVICE void clear() {
#pragma unroll
            for (int i = 0; i < 4; ++i) low[i] = high[i] = sum[i] = 0.0f;
        }
    };

    static QPN_DEVICE void copy(uint32_t slot, const Bank& bank, const Tile& tile,
                                const LaneMap& map, int lane) {
        copy_chunk<kKind, kLayout, kStraddles>(slot, bank, tile, map, lane);
    }
    static QPN_DEVICE void clear(Total& total) {
#pragma unroll
        for (int i = 0; i < 8; ++i) total.v[i / 2][i % 2] = 0.0f;
    }

    // This lane's rows of B: row g of the pass, or null.
    static QPN_DEVICE void load_x(Vector (&x)[kChunkBlocks], const Bank& bank, const uint16_t* row,
                                  int32_t chunk, int lane) {
        const int32_t at = chunk * kChunkRows + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i) {
            x[i] = Vector{0, 0, 0, 0};
            if (row != nullptr && at + i * kBlockRows < bank.k)
                x[i] = load_activations(row + at + i * kBlockRows);
        }
    }

    static QPN_DEVICE void flush(Total& total, Sums& sums, uint32_t slot, int half, int from,
                                 const Bank& bank, const LaneMap& map) {
        Raw<kKind, kLayout> raw;
        float scale[4], zero[4];
        S::raw(raw, slot, half, from);
        decode(raw, bank, map.float_one, scale, zero);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const float v[4] = {sums.low[u], sums.low[2 + u], sums.high[u], sums.high[2 + u]};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float value = v[c];
                if constexpr (kSums) value = fmaf(-with_offset<C>(zero[c]), sums.sum[u], value);
                total.v[c][u] = fmaf(scale[c], value, total.v[c][u]);
            }
        }
        sums.clear();
    }

    static QPN_DEVICE void consume(Total& total, uint32_t slot, const Bank& bank,
                                   Vector (&x)[kChunkBlocks], const LaneMap& map, int lane) {
        Sums sums;
        sums.clear();
        const int g = map.place & 7;
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i) {
            if constexpr (kSums && C::kDividesOdd) {
                x[i].y = C::odd_activations(x[i].y);
                x[i].w = C::odd_activations(x[i].w);
            }
            const Vector v = S::words(slot, i, map);
            uint32_t p[4][4];
            if constexpr (kFused) {
                Raw<kKind, kLayout> raw;
                S::raw(raw, slot, lane % 4 / 2, i * 8 + g);
                fused_products<Act, kLayout>(v, raw, bank, x[i], sums.low, sums.high);
            } else if constexpr (kScaled) {
                Raw<kKind, kLayout> raw;
                S::raw(raw, slot, lane % 4 / 2, i * 8 + g);
                scaled_products<Act>(v, raw.r[0], x[i], sums.low, sums.high);
            } else if constexpr (kFlush == 0) {
                unpack_block<C>(v, p);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const bool mine = lane % 4 / 2 == h;
                    const Vector b{mine ? x[i].x : 0u, mine ? x[i].y : 0u, mine ? x[i].z : 0u,
                                   mine ? x[i].w : 0u};
                    block_products<Act>(p, b, sums.low, sums.high);
                    if constexpr (kSums) block_sums<Act, C>(b, sums.sum);
                    flush(total, sums, slot, h, i * 8 + g, bank, map);
                }
            } else {
                unpack_block<C>(v, p);
                block_products<Act>(p, x[i], sums.low, sums.high);
                if constexpr (kSums) block_sums<Act, C>(x[i], sums.sum);
                if ((i + 1) % kFlush == 0)
                    flush(total, sums, slot, 0, i / kFlush * kFlush * 8 + g, bank, map);
            }
        }
        if constexpr (kFused || kScaled) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                total.v[0][u] += sums.low[u];
                total.v[1][u] += sums.low[2 + u];
                total.v[2][u] += sums.high[u];
                total.v[3][u] += sums.high[2 + u];
            }
        }
    }

    static QPN_DEVICE void store(const Total& total, uint32_t part, int rows, int lane) {
        constexpr float kBack = kFused ? 1.0f : C::kBack;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int row = lane % 4 * 2 + u;
            if (row < rows)
                write_floats(part + (row * kPitch + lane / 4 * 4) * 4, total.v[0][u] * kBack,
                             total.v[1][u] * kBack, total.v[2][u] * kBack, total.v[3][u] * kBack);
        }
    }
};

}  // namespace qpn
