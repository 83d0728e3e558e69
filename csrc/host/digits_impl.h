// Products of codes and activations in integers. A row's values are split, group by group, into a
// power of two and signed bytes ("digits", base 256): two for bf16, three for fp16 and fp32, so the
// largest value of a group keeps 15 or 23 bits and every sum of a group is exact. A zero point then
// costs one product for a group, and a row's result does not depend on the rows beside it.
#pragma once
#include "groups_impl.h"

namespace qpn {
namespace {

// Where row j of a word stands in the digits: bytes as `Codes` yields them.
constexpr int kPlaceOfRow[8] = {0, 2, 4, 6, 1, 3, 5, 7};

constexpr int32_t most_of(int digits) { return digits == 2 ? 32639 : 8355711; }  // all digits 127

// The codes of a vector of words as unsigned bytes: rows 0, 4, 1, 5 and rows 2, 6, 3, 7.
struct Int4 {
    Words low, high;
    static constexpr int kMost = 15;
    static constexpr int kFixedZero = 0;
    explicit Int4(Words word) : low(word & 0x0f0f0f0fu), high(word >> 4 & 0x0f0f0f0fu) {}
};

// e2m1: twice the value is a small integer; 12 is added to make it unsigned and taken off again
// as a zero point.
struct E2m1 {
    Words low, high;
    static constexpr int kMost = 24;
    static constexpr int kFixedZero = 12;
    explicit E2m1(Words word) : low(from(word & 0x0f0f0f0fu)), high(from(word >> 4 & 0x0f0f0f0fu)) {}

    static Words from(Words nibbles) {
#if defined(__AVX512BW__)
        const __m512i table = _mm512_set4_epi32(0x00040608, 0x090a0b0c, 0x18141210, 0x0f0e0d0c);
        return (Words)_mm512_shuffle_epi8(table, (__m512i)nibbles);
#elif defined(__AVX2__)
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)nibbles);
#else
        static const uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        uint8_t bytes[4 * kColumns];
        memcpy(bytes, &nibbles, sizeof bytes);
        for (int i = 0; i < 4 * kColumns; ++i) bytes[i] = table[bytes[i]];
        memcpy(&nibbles, bytes, sizeof bytes);
        return nibbles;
#endif
    }
};

inline int32_t four_digits(const int8_t* at) {
    int32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

#if defined(__AVX512VNNI__)

template <class Codes, int V, int R, int D>
inline void dot(const uint32_t* words, int64_t count, const int8_t* const* x, Ints sum[V][R][D]) {
    for (int64_t k8 = 0; k8 < count; ++k8)
        for (int v = 0; v < V; ++v) {
            const Codes codes(load<Words>(words + k8 * kTile + v * kColumns));
            for (int r = 0; r < R; ++r)
                for (int d = 0; d < D; ++d) {
                    const int8_t* at = x[r] + (k8 * D + d) * kRowsPerWord;
                    __m512i& s = (__m512i&)sum[v][r][d];
                    s = _mm512_dpbusd_epi32(s, (__m512i)codes.low, _mm512_set1_epi32(four_digits(at)));
                    s = _mm512_dpbusd_epi32(s, (__m512i)codes.high, _mm512_set1_epi32(four_digits(at + 4)));
                }
        }
}

#elif defined(__AVX2__)

// Pairs of products add up in 16 bits for as many words as cannot overflow them.
template <class Codes, int V, int R, int D>
inline void dot(const uint32_t* words, int64_t count, const int8_t* const* x, Ints sum[V][R][D]) {
    constexpr int kBlock = 32767 / (Codes::kMost * 128 * 4);
    static_assert(kBlock >= 2, "the smallest group, 16 rows, adds up in one block");
    for (int64_t first = 0; first < count; first += kBlock) {
        const int64_t last = count < first + kBlock ? count : first + kBlock;
        __m256i pairs[V][R][D] = {};
        for (int64_t k8 = first; k8 < last; ++k8)
            for (int v = 0; v < V; ++v) {
                const Codes codes(load<Words>(words + k8 * kTile + v * kColumns));
                for (int r = 0; r < R; ++r)
                    for (int d = 0; d < D; ++d) {
                        const int8_t* at = x[r] + (k8 * D + d) * kRowsPerWord;
                        const __m256i low = _mm256_maddubs_epi16((__m256i)codes.low, _mm256_set1_epi32(four_digits(at)));
                        const __m256i high = _mm256_maddubs_epi16((__m256i)codes.high, _mm256_set1_epi32(four_digits(at + 4)));
                        pairs[v][r][d] = _mm256_add_epi16(pairs[v][r][d], _mm256_add_epi16(low, high));
                    }
            }
        for (int v = 0; v < V; ++v)
            for (int r = 0; r < R; ++r)
                for (int d = 0; d < D; ++d)
                    sum[v][r][d] += (Ints)_mm256_madd_epi16(pairs[v][r][d], _mm256_set1_epi16(1));
    }
}

#else

template <class Codes, int V, int R, int D>
inline void dot(const uint32_t* words, int64_t count, const int8_t* const* x, Ints sum[V][R][D]) {
    for (int64_t k8 = 0; k8 < count; ++k8)
        for (int v = 0; v < V; ++v) {
            const Codes codes(load<Words>(words + k8 * kTile + v * kColumns));
            for (int byte = 0; byte < 4; ++byte) {
                const Ints low = (Ints)(codes.low >> (8 * byte) & 0xffu);
                const Ints high = (Ints)(codes.high >> (8 * byte) & 0xffu);
                for (int r = 0; r < R; ++r)
                    for (int d = 0; d < D; ++d) {
                        const int8_t* at = x[r] + (k8 * D + d) * kRowsPerWord + byte;
                        sum[v][r][d] += low * int32_t{at[0]} + high * int32_t{at[4]};
                    }
            }
        }
}

#endif

// One group of V vectors for R rows: the sums, scaled and added to each row's results.
template <class Codes, int V, int R, int D>
inline void add_group(const Row* rows, const uint32_t* words, int64_t g, int64_t first, int64_t last,
                      const Group& group, int vector, Floats total[V][R]) {
    Ints sum[V][R][D] = {};
    const int8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows[r].digits + first * D * kRowsPerWord;
    dot<Codes, V, R, D>(words + first * kTile, last - first, x, sum);
    for (int v = 0; v < V; ++v) {
        const int at = (vector + v) * kColumns;
        for (int r = 0; r < R; ++r) {
            const int32_t* taken = rows[r].sums + g * D;
            Floats value{};
            for (int d = D - 1; d >= 0; --d) {
                const Ints zeros = Codes::kFixedZero ? Ints{} + Codes::kFixedZero * taken[d]
                                                     : load<Ints>(group.zero + at) * taken[d];
                value = fma(value, all(256.0f), to_floats(sum[v][r][d] - zeros));
            }
            total[v][r] = fma(value, load<Floats>(group.scale + at) * rows[r].scale[g], total[v][r]);
        }
    }
}

// V vectors at a time: all of a tile for one row, so that memory is read in order; one for several
// rows, whose sums fill the registers.
template <class Codes, int R, int D>
void run_rows(const TileCall& call, const Row* rows, float* const* y) {
    constexpr int V = R == 1 ? kVectors : 1;
    const Bank& bank = *call.bank;
    const uint32_t* words = tile_of(bank, call.slot, call.tile);
    const int64_t entry = call.slot * bank.plane() + call.tile * kTile;
    Floats total[kVectors / V][V][R] = {};
    for (int64_t g = 0; g < bank.groups(); ++g) {
        Group group;
        read_group(bank, entry + g * bank.n_padded(), group);
        int64_t first, last;
        span(bank, g, first, last);
        for (int vector = 0; vector < kVectors; vector += V)
            add_group<Codes, V, R, D>(rows, words + vector * kColumns, g, first, last, group, vector,
                                      total[vector / V]);
    }
    for (int vector = 0; vector < kVectors; ++vector)
        for (int r = 0; r < R; ++r) store(y[r] + vector * kColumns, total[vector / V][vector % V][r]);
}

#ifdef __AVX512F__
constexpr int kRowsAtOnce = 8;
#else
constexpr int kRowsAtOnce = 4;
#endif
static_assert(kMostRows % kRowsAtOnce == 0, "passes over the rows of a call have equal lengths");

template <class Codes, int D>
void run_digits(const TileCall& call) {
    for (int done = 0; done < call.rows; done += kRowsAtOnce) {
        const Row* rows = call.row + done;
        float* const* y = call.y + done;
        switch (call.rows - done) {
            case 1: run_rows<Codes, 1, D>(call, rows, y); break;
            case 2: run_rows<Codes, 2, D>(call, rows, y); break;
            case 3: run_rows<Codes, 3, D>(call, rows, y); break;
            case 4: run_rows<Codes, 4, D>(call, rows, y); break;
#ifdef __AVX512F__
            case 5: run_rows<Codes, 5, D>(call, rows, y); break;
            case 6: run_rows<Codes, 6, D>(call, rows, y); break;
            case 7: run_rows<Codes, 7, D>(call, rows, y); break;
#endif
            default: run_rows<Codes, kRowsAtOnce, D>(call, rows, y); break;
        }
    }
}

// Splits one group of a row; a value that is no number makes all results of the group NaN.
template <int D>
void split(const float* x, int64_t first, int64_t last, int8_t* digits, int32_t* sums, float& scale) {
    uint32_t top = 0;
    for (int64_t k = first; k < last; ++k) {
        const uint32_t size = to_bits(x[k]) & 0x7fffffffu;
        top = size > top ? size : top;
    }
    memset(digits + first * D, 0, static_cast<size_t>(last - first) * D);
    for (int d = 0; d < D; ++d) sums[d] = 0;
    scale = top >= 0x7f800000u ? from_bits(0x7fc00000u) : 0.0f;
    if (top == 0 || top >= 0x7f800000u) return;
    // The smallest power of two that keeps the largest value within its digits.
    int32_t power = static_cast<int32_t>(top >> 23) - 127 - (8 * D - 2);
    power = power < -120 ? -120 : power;
    if (rintf(from_bits(top) * from_bits(static_cast<uint32_t>(127 - power) << 23)) > most_of(D)) ++power;
    const float inverse = from_bits(static_cast<uint32_t>(127 - power) << 23);
    scale = from_bits(static_cast<uint32_t>(127 + power) << 23);
    for (int64_t k = first; k < last; ++k) {
        int32_t rest = static_cast<int32_t>(rintf(x[k] * inverse));
        int8_t* at = digits + (k / kRowsPerWord * D) * kRowsPerWord + kPlaceOfRow[k % kRowsPerWord];
        for (int d = 0; d < D; ++d) {
            const int8_t digit = static_cast<int8_t>(rest);
            at[d * kRowsPerWord] = digit;
            sums[d] += digit;
            rest = (rest - digit) >> 8;
        }
    }
}

template <int D>
void split_row(const Bank& bank, const float* x, int8_t* digits, int32_t* sums, float* scale) {
    for (int64_t g = 0; g < bank.groups(); ++g) {
        int64_t first, last;
        span(bank, g, first, last);
        split<D>(x, first * kRowsPerWord, last * kRowsPerWord, digits, sums + g * D, scale[g]);
    }
}

}  // namespace
}  // namespace qpn
