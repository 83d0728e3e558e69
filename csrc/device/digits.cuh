// Activations as integers, for products of integers on tensor cores.
//
// Neighbouring numbers (a segment of 16; a chunk of 128 for several rows) become 16-bit integers X
// with x = X * scale, scale = max|x| / 32512: the error of a number is below 2^-16 of the largest.
// X is two signed digits, 256 high
// + low, each a byte, in the order in which the codes of a weight word come out of it. A segment
// with a number that is not finite has scale NaN.
#pragma once
#include "access.cuh"
#include "numbers.cuh"
#include "qpn.cuh"

namespace qpn {

// A row of K numbers: digits of each chunk, then what belongs to each block.
//   digits: 8 bytes at ((block * 2 + digit) * 4 + k8) * 8, k8 = 0..3: rows 8 k8..8 k8 + 7
//   notes: 16 bytes a block: scale of each half (16 rows), sum of the numbers of each half; fp32
constexpr int kDigitBytes = kChunkRows * 2;                              // of a chunk
constexpr int kNoteBytes = 16;                                           // of a block
constexpr int kDigitRowBytes = kDigitBytes + kChunkBlocks * kNoteBytes;  // of a chunk, with notes

// Byte of row j of eight, as `Bytes::unpack` deals out the codes of a word.
template <int kKind>
QPN_DEVICE int digit_place(int j) {
    return kKind == kE2m1 ? (j & 1) * 4 + (j >> 1) : (j >> 1 & 1) * 4 + (j & 1) * 2 + (j >> 2);
}

struct DigitScale {
    float scale, inverse;
    // `most`: the largest of the numbers as bits without their signs.
    QPN_DEVICE explicit DigitScale(uint32_t most) {
        const float m = bits_to_float(most);
        const bool none = most < 0x0d800000u;  // 2^-100: below it nothing is left
        const bool wild = most >= 0x7f800000u;
        scale = wild ? bits_to_float(0x7fffffffu) : none ? 0.0f : m * (1.0f / 32512.0f);
        inverse = wild || none ? 0.0f : __fdividef(32512.0f, m);
    }
    // X, to nearest, as a two's complement number.
    QPN_DEVICE int32_t digits(float x) const {
        return __float_as_int(fmaf(x, inverse, 12582912.0f)) - 0x4b400000;
    }
};

QPN_DEVICE uint32_t without_sign(float x) { return __float_as_uint(x) & 0x7fffffffu; }

QPN_DEVICE uint32_t four_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Eight numbers as digits, and their sum. `kLanes` neighbouring lanes share a scale.
struct EightDigits {
    uint32_t high[2], low[2];
    int32_t sum;
    float scale;
};
template <class Act, int kKind, int kLanes>
QPN_DEVICE EightDigits to_digits(const Vector& v) {
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
    float x[8];
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        x[j] = Act::to_float(j % 2 ? pairs[j / 2] >> 16 : pairs[j / 2] & 0xffffu);
        most = max(most, without_sign(x[j]));
    }
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
    const DigitScale to(most);
    EightDigits out{{}, {}, 0, to.scale};
    uint32_t low[8], high[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int32_t number = to.digits(x[j]), at = digit_place<kKind>(j);
        out.sum += number;
        low[at] = uint32_t(number);
        high[at] = uint32_t(number + 128) >> 8;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        out.high[i] = four_bytes(high[4 * i], high[4 * i + 1], high[4 * i + 2], high[4 * i + 3]);
        out.low[i] = four_bytes(low[4 * i], low[4 * i + 1], low[4 * i + 2], low[4 * i + 3]);
    }
    return out;
}

// Eight numbers of one row (vector `at` of the row), staged to shared memory. Whole warps take
// part. Nothing is written where `at` is `end` or more.
template <class Act, int kKind>
QPN_DEVICE void stage_digits(uint32_t digits, uint32_t notes, int32_t at, int32_t end,
                             const Vector& v) {
    const EightDigits own = to_digits<Act, kKind, 2>(v);
    const int32_t sum = own.sum + __shfl_xor_sync(0xffffffffu, own.sum, 1);
    if (at >= end) return;
    const uint32_t place = digits + (at / 4) * 64 + at % 4 * 8;
    write_pair(place, own.high[0], own.high[1]);
    write_pair(place + 32, own.low[0], own.low[1]);
    if (at % 2 == 0) {
        const uint32_t note = notes + at / 4 * kNoteBytes + at / 2 % 2 * 4;
        write_word(note, __float_as_uint(own.scale));
        write_word(note + 8, __float_as_uint(own.scale * float(sum)));
    }
}

// One segment to a row in memory: number m of it is `value` of lanes 2m and 2m + 1.
template <int kKind>
QPN_DEVICE void give_digits(uint8_t* row, int32_t chunks, int32_t segment, float value, int lane) {
    const DigitScale to(__reduce_max_sync(0xffffffffu, without_sign(value)));
    const int32_t number = to.digits(value);
    const int32_t sum = __reduce_add_sync(0xffffffffu, number) / 2;
    const int32_t block = segment / 2, k8 = segment % 2 * 2 + lane / 16, j = lane / 2 % 8;
    row[((block * 2 + lane % 2) * 4 + k8) * 8 + digit_place<kKind>(j)] =
        uint8_t(lane % 2 ? number : (number + 128) >> 8);
    float* note = reinterpret_cast<float*>(row + chunks * kDigitBytes) + block * 4 + segment % 2;
    if (lane == 0) note[0] = to.scale;
    if (lane == 1) note[2] = to.scale * float(sum);
}

// What follows the last segment of a row: nothing, up to the end of its chunk.
QPN_DEVICE void end_row(uint8_t* row, int32_t chunks, int32_t segments, int lane) {
    float* note = reinterpret_cast<float*>(row + chunks * kDigitBytes);
#pragma unroll 1
    for (int32_t i = segments + lane; i < chunks * (kChunkRows / kSegmentRows); i += 32)
        note[i / 2 * 4 + i % 2] = note[i / 2 * 4 + i % 2 + 2] = 0.0f;
}

}  // namespace qpn
