// One row of activations: products of integers, m16n8k32.
//
// Only the columns 2t and 2t + 1 of B hold anything at the rows that the lanes with t = lane % 4
// bring (the two digits of an activation), so a lane finds the sums of its own words in its own
// accumulators. It may then take any words, as long as all lanes of one t take the same rows: block
// t of a chunk, and four columns each, dealt out so that a read meets every bank of shared memory
// once.
#pragma once
#include "barrier.cuh"
#include "digits.cuh"
#include "metadata.cuh"
#include "mma.cuh"

namespace qpn {

// Weight words as bytes with a sign: codes, or 64 + twice the number.
template <int kKind>
struct Bytes {
    static constexpr float kOffset = 0.0f, kBack = 1.0f;
    QPN_DEVICE void unpack(uint32_t w, uint32_t& first, uint32_t& second) const {
        first = w & 0x0f0f0f0fu;
        second = w >> 4 & 0x0f0f0f0fu;
    }
};
// Looked up: a selector with its high bit set takes the sign of the byte instead, which is 0
// throughout; so the two tables never meet. An instruction has room for one of a table's halves.
template <>
struct Bytes<kE2m1> {
    static constexpr float kOffset = 64.0f, kBack = 0.5f;
    const uint32_t plus = pinned_constant(0x43424140u), minus = pinned_constant(0x3d3e3f40u);
    QPN_DEVICE void unpack(uint32_t w, uint32_t& first, uint32_t& second) const {
        const uint32_t other = w ^ 0x88888888u;
        first = prmt(plus, 0x4c484644u, w) | prmt(minus, 0x34383a3cu, other);
        second = prmt(plus, 0x4c484644u, w >> 16) | prmt(minus, 0x34383a3cu, other >> 16);
    }
};

template <int kKind>
QPN_DEVICE float with_zero(float zero) {
    if constexpr (kKind == kE2m1) return Bytes<kKind>::kOffset;
    return zero;
}

// What a lane needs again and again.
struct SingleLane {
    uint32_t reads;      // bytes into a chunk: its words of the first 8 rows
    uint32_t place;      // of the metadata of its columns and block
    uint32_t digits;     // bytes into a row: its digits, where it brings any
    uint32_t brings;     // it does: all ones, or 0
    uint32_t float_one;  // 2^23: an integer below that as its low bits is as much more

    QPN_DEVICE explicit SingleLane(int lane) {
        const int g = lane / 4, t = lane % 4, four = columns(lane);
        reads = pinned(t * 512 + four * 16);
        place = pinned(t * 8 + four);
        digits = pinned(t * 64 + g % 2 * 32);
        brings = pinned(g / 2 == t ? 0xffffffffu : 0u);
        float_one = pinned_constant(0x4b000000u);
    }
    static QPN_DEVICE int columns(int lane) { return (lane / 4 + 2 * (lane % 4)) & 7; }
    // The lane with the same columns and t ^ d.
    static QPN_DEVICE int beside(int lane, int d) {
        const int t = lane % 4 ^ d;
        return ((columns(lane) - 2 * t) & 7) * 4 + t;
    }
};

// Where a warp reads one tile of one expert, chunk by chunk.
struct SingleTile {
    const uint32_t* words;  // of the next chunk
    const uint8_t *plane, *second;
    uint32_t entry;   // of group 0 at the columns that this lane copies
    int32_t segment;  // first of the block that this lane copies in the next chunk
    int32_t left;     // blocks from the next chunk's first on

    QPN_DEVICE void at(const Bank& bank, int32_t slot, int32_t tile, int32_t chunk, int lane) {
        const int64_t expert = int64_t(slot) * bank.groups * bank.np();
        words = bank.words + bank.tile_at(slot, tile) + chunk * (kChunkBytes / 4);
        plane = bank.plane + expert * bank.entry_bytes;
        second = bank.second + expert / 2;
        entry = tile * kTile + lane % 8 * 4;
        segment = (chunk * kChunkBlocks + lane / 8) * 2;
        left = bank.blocks - chunk * kChunkBlocks;
    }
    QPN_DEVICE void advance() {
        words += kChunkBytes / 4;
        segment += 2 * kChunkBlocks;
        left -= kChunkBlocks;
    }
};

template <class ActT, int kKindT, int kLayout, bool kStraddles>
struct Single {
    using Act = ActT;
    static constexpr int kKind = kKindT;
    static constexpr int kRaws = kStraddles ? 2 : 1;
    static constexpr int kPlaces = 32 * kRawBytes<kKind, kLayout>;  // metadata of all lanes
    static constexpr int kBytes = kChunkBytes + kRaws * kPlaces;    // of a chunk in shared memory

    // By all lanes. From SM90 on one of them copies the words.
    static QPN_DEVICE void copy(uint32_t slot, uint32_t barrier, const Bank& bank,
                                const SingleTile& tile, int lane) {
#if QPN_ARCH >= 900
        if (lane == 0) {
            const uint32_t bytes = uint32_t(min(tile.left, kChunkBlocks)) * 512;
            expect_bytes(barrier, bytes);
            copy_bulk(slot, tile.words, bytes, barrier);
        }
#else
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i)
            copy_or_zero<16>(slot + i * 512 + lane * 16, tile.words + i * 128 + lane * 4,
                             i < tile.left);
#endif
#pragma unroll
        for (int h = 0; h < kRaws; ++h)
            copy_raw<kKind, kLayout>(
                slot + kChunkBytes + h * kPlaces, lane, tile.plane, tile.second,
                tile.entry + uint32_t(bank.group_of(tile.segment + h) * bank.row_entries),
                lane / 8 < tile.left);
        copies_arrive(barrier);
    }

    // Adds one chunk. `digits`: of the chunk where this lane brings some, else 32 bytes of 0;
    // `notes`: of this lane's block.
    static QPN_DEVICE void consume(float (&total)[4], uint32_t slot, const Bank& bank,
                                   uint32_t digits, uint32_t notes, const SingleLane& map,
                                   const Bytes<kKind>& bytes) {
        int32_t low[2][4] = {}, high[2][4] = {};
        const Vector x[2] = {read_vector(digits), read_vector(digits + 16)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Vector v = read_vector(slot + map.reads + i * 128);
            const uint32_t b0 = i % 2 ? x[i / 2].z : x[i / 2].x,
                           b1 = i % 2 ? x[i / 2].w : x[i / 2].y;
            uint32_t a[4][2];
            bytes.unpack(v.x, a[0][0], a[0][1]);
            bytes.unpack(v.y, a[1][0], a[1][1]);
            bytes.unpack(v.z, a[2][0], a[2][1]);
            bytes.unpack(v.w, a[3][0], a[3][1]);
            mma_16x8x32(low[i / 2], a[0][0], a[1][0], a[0][1], a[1][1], b0, b1);
            mma_16x8x32(high[i / 2], a[2][0], a[3][0], a[2][1], a[3][1], b0, b1);
        }
        const Vector note = read_vector(notes);
        const float x_scale[2] = {bits_to_float(note.x), bits_to_float(note.y)};
        const float x_sum[2] = {bits_to_float(note.z), bits_to_float(note.w)};
        float v[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int32_t (&from)[4] = c < 2 ? low[h] : high[h];
                v[h][c] = x_scale[h] * float(from[c % 2 * 2] * 256 + from[c % 2 * 2 + 1]);
            }
#pragma unroll
        for (int h = 0; h < kRaws; ++h) {
            Raw<kKind, kLayout> raw;
            float scale[4], zero[4];
            read_raw(raw, slot + kChunkBytes + h * kPlaces, map.place);
            decode(raw, bank, map.float_one, scale, zero);
            const float sum = kStraddles ? x_sum[h] : x_sum[0] + x_sum[1];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float value = kStraddles ? v[h][c] : v[0][c] + v[1][c];
                total[c] = fmaf(scale[c], fmaf(-with_zero<kKind>(zero[c]), sum, value), total[c]);
            }
        }
    }

    // Sums of the 32 columns over the four lanes of each; of those, each lane keeps one.
    static QPN_DEVICE void store(const float (&total)[4], uint32_t part, int lane) {
        const bool odd = lane % 2, upper = lane / 2 % 2;
        const int next = SingleLane::beside(lane, 1), far = SingleLane::beside(lane, 2);
        float two[2], one;
#pragma unroll
        for (int c = 0; c < 2; ++c)
            two[c] = (odd ? total[2 + c] : total[c]) +
                     __shfl_sync(0xffffffffu, odd ? total[c] : total[2 + c], next);
        one = (upper ? two[1] : two[0]) + __shfl_sync(0xffffffffu, upper ? two[0] : two[1], far);
        write_word(part + (SingleLane::columns(lane) * 4 + odd * 2 + upper) * 4,
                   __float_as_uint(one * Bytes<kKind>::kBack));
    }
};

}  // namespace qpn
