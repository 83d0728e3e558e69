// Up to eight rows of activations as digits: products of integers, m16n8k32, weights as A.
//
// Lane (g = lane / 4, t = lane % 4) takes 16 bytes of a block of 32 rows, as in m16.cuh: columns
// 4g..4g+3 at rows 8t..8t+7, four operands of two registers each. Of B, a row takes two columns,
// its high digits and its low ones, so that the two accumulators of a lane are the digits of one
// number. Four rows make a tile of B.
#pragma once
#include "m16.cuh"
#include "single.cuh"
#include "staged.cuh"

namespace qpn {

// int4; whole chunks lie in one group, or only blocks do for sure.
template <int kLayout, bool kWholeT>
struct DigitRows {
    static constexpr bool kWhole = kWholeT;
    static constexpr int kTileRows = 4, kTiles = kPassRows / kTileRows;
    using S = Slot<kInt4, kLayout, false>;
    using Sums = StagedSums<kWhole ? kChunkRows : kBlockRows>;

    // What a lane brings and finds, in shared memory.
    struct Rows {
        uint32_t digits[kTiles];  // of its row of B: of chunk 0
        uint32_t notes[kTiles];   // of its row of the sums: of chunk 0
        uint32_t zeros;
        int32_t left;  // rows from its row of B on

        // Row r is staged as number `place(r)`.
        template <class Place>
        QPN_DEVICE Rows(uint32_t base, const StagedLayout& at, int32_t rows, int lane,
                        Place place) {
            const int g = lane / 4, t = lane % 4;
            zeros = base;
            left = rows - g / 2;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const int32_t brings = place(min(n * kTileRows + g / 2, rows - 1));
                const int32_t finds = place(min(n * kTileRows + t, rows - 1));
                digits[n] = base + at.rows + brings * at.row + (g % 2 * 4 + t) * 16;
                notes[n] = base + at.notes + finds * Sums::kNote;
            }
        }
        QPN_DEVICE uint32_t digits_of(int tile, int32_t chunk) const {
            return tile * kTileRows < left ? digits[tile] + chunk * kDigitBytes : zeros;
        }
        QPN_DEVICE uint32_t note_of(int tile, int32_t chunk) const {
            return notes[tile] + chunk * (kPassRows * Sums::kNote);
        }
    };

    static QPN_DEVICE void copy(uint32_t slot, const Bank& bank, const Tile& tile,
                                const LaneMap& map, int lane) {
        copy_chunk<kInt4, kLayout, false>(slot, bank, tile, map, lane);
    }
    template <int kUsed>
    static QPN_DEVICE void clear(float (&total)[kUsed][4]) {
#pragma unroll
        for (int i = 0; i < kUsed * 4; ++i) total[i / 4][i % 4] = 0.0f;
    }

    // Sums of digits of four columns, two accumulators each.
    struct Sum {
        int32_t low[4] = {}, high[4] = {};
        QPN_DEVICE void add(const uint32_t (&a)[4][2], uint32_t b0, uint32_t b1) {
            mma_16x8x32(low, a[0][0], a[1][0], a[0][1], a[1][1], b0, b1);
            mma_16x8x32(high, a[2][0], a[3][0], a[2][1], a[3][1], b0, b1);
        }
        // Adds scale * (sum - zero * activations).
        QPN_DEVICE void flush(float (&to)[4], const float (&scale)[4], const int32_t (&zero)[4],
                              int32_t activations) const {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int32_t (&from)[4] = c < 2 ? low : high;
                const int32_t sum = from[c % 2 * 2] * 256 + from[c % 2 * 2 + 1];
                to[c] = fmaf(scale[c], float(sum - zero[c] * activations), to[c]);
            }
        }
    };
    static QPN_DEVICE void unpack(const Vector& v, uint32_t (&a)[4][2]) {
        const Bytes<kInt4> bytes{};
        bytes.unpack(v.x, a[0][0], a[0][1]);
        bytes.unpack(v.y, a[1][0], a[1][1]);
        bytes.unpack(v.z, a[2][0], a[2][1]);
        bytes.unpack(v.w, a[3][0], a[3][1]);
    }

    // Adds one chunk, of `kUsed` tiles of B.
    template <int kUsed>
    static QPN_DEVICE void consume(float (&total)[kUsed][4], uint32_t slot, const Bank& bank,
                                   const Rows& rows, int32_t chunk, const LaneMap& map) {
        if constexpr (kWhole)
            consume_whole(total, slot, bank, rows, chunk, map);
        else
            consume_blocks(total, slot, bank, rows, chunk, map);
    }

    // One group: digits of all blocks are added up before anything is scaled.
    template <int kUsed>
    static QPN_DEVICE void consume_whole(float (&total)[kUsed][4], uint32_t slot, const Bank& bank,
                                         const Rows& rows, int32_t chunk, const LaneMap& map) {
        Sum sum[kUsed];
        Vector b[kUsed][2];
#pragma unroll
        for (int n = 0; n < kUsed; ++n) {
            const uint32_t from = rows.digits_of(n, chunk);
            b[n][0] = read_vector(from);
            b[n][1] = read_vector(from + kDigitBytes / 2);
        }
        Raw<kInt4, kLayout> raw;
        S::raw(raw, slot, 0, map.place & 7);
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i) {
            uint32_t a[4][2];
            unpack(S::words(slot, i, map), a);
#pragma unroll
            for (int n = 0; n < kUsed; ++n) {
                const Vector& v = b[n][i / 2];
                sum[n].add(a, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
            }
        }
        float scale[4];
        int32_t zero[4];
        decode(raw, bank, map.float_one, scale, zero);
#pragma unroll
        for (int n = 0; n < kUsed; ++n) {
            uint32_t factor, activations;
            read_pair(rows.note_of(n, chunk), factor, activations);
            float both[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) both[c] = scale[c] * bits_to_float(factor);
            sum[n].flush(total[n], both, zero, int32_t(activations));
        }
    }

    // Scales may change from block to block.
    template <int kUsed>
    static QPN_DEVICE void consume_blocks(float (&total)[kUsed][4], uint32_t slot, const Bank& bank,
                                          const Rows& rows, int32_t chunk, const LaneMap& map) {
        float own[kUsed][4];
        Vector b[kUsed];
        uint32_t activations[kUsed][2];
        clear(own);
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i) {
            uint32_t a[4][2];
            float scale[4];
            int32_t zero[4];
            Raw<kInt4, kLayout> raw;
            unpack(S::words(slot, i, map), a);
            S::raw(raw, slot, 0, i * 8 + (map.place & 7));
            decode(raw, bank, map.float_one, scale, zero);
#pragma unroll
            for (int n = 0; n < kUsed; ++n) {
                if (i % 2 == 0) {
                    b[n] = read_vector(rows.digits_of(n, chunk) + i / 2 * (kDigitBytes / 2));
                    read_pair(rows.note_of(n, chunk) + Sums::kAt + i * 4, activations[n][0],
                              activations[n][1]);
                }
                Sum sum;
                sum.add(a, i % 2 ? b[n].z : b[n].x, i % 2 ? b[n].w : b[n].y);
                sum.flush(own[n], scale, zero, int32_t(activations[n][i % 2]));
            }
        }
#pragma unroll
        for (int n = 0; n < kUsed; ++n) {
            const float factor = bits_to_float(read_word(rows.note_of(n, chunk)));
#pragma unroll
            for (int c = 0; c < 4; ++c) total[n][c] = fmaf(factor, own[n][c], total[n][c]);
        }
    }

    template <int kUsed>
    static QPN_DEVICE void store(const float (&total)[kUsed][4], uint32_t part, int rows,
                                 int lane) {
#pragma unroll
        for (int n = 0; n < kUsed; ++n) {
            const int row = n * kTileRows + lane % 4;
            if (row < rows)
                write_floats(part + (row * kPitch + lane / 4 * 4) * 4, total[n][0], total[n][1],
                             total[n][2], total[n][3]);
        }
    }
};

}  // namespace qpn
