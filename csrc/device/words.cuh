// 4-bit codes of a source to the words of a bank; numbers that are kept as they are.
#pragma once
#include "pieces.cuh"

namespace qpn {
inline namespace conversion {

QPN_BOTH void swap_bits(uint32_t& low, uint32_t& high, int shift, uint32_t mask) {
    const uint32_t t = ((low >> shift) ^ high) & mask;
    high ^= t;
    low ^= t << shift;
}

// Nibble p of v[i] becomes nibble i of v[p].
QPN_BOTH void transpose_nibbles(uint32_t v[8]) {
    for (int i = 0; i < 4; ++i) swap_bits(v[i], v[i + 4], 16, 0x0000ffffu);
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; ++j) swap_bits(v[j], v[j + 2], 8, 0x00ff00ffu);
    for (int i = 0; i < 8; i += 2) swap_bits(v[i], v[i + 1], 4, 0x0f0f0f0fu);
}

// Codes 0..7 of a word, low nibble first, to the nibbles of a bank word.
QPN_BOTH uint32_t to_bank_order(uint32_t word) {
    uint32_t t = (word ^ (word >> 4)) & 0x00f000f0u;
    word ^= t ^ (t << 4);
    t = (word ^ (word >> 8)) & 0x0000ff00u;
    return word ^ t ^ (t << 8);
}

// Eight rows of K by one word of eight columns. Rows past the last are codes of zero.
QPN_BOTH void codes_kn(const Job& job, int64_t row8, int64_t word) {
    uint32_t v[8], words[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int64_t r = 8 * row8 + j;
        v[nibble_of(j)] = r < job.piece.rows ? load32(job.row(r) + word * 4) : 0u;
    }
    transpose_nibbles(v);
#pragma unroll
    for (int m = 0; m < 8; ++m) words[m] = v[nibble_of(m)];
    job.put_words(8 * word, job.piece.dest_row / kRowsPerWord + row8, words, 8);
}

// Up to eight rows of N by one word of eight K.
QPN_BOTH void codes_nk(const Job& job, int64_t row8, int64_t word) {
    uint32_t words[8];
    const int64_t count = job.piece.rows - 8 * row8;
#pragma unroll
    for (int r = 0; r < 8; ++r)
        words[r] = r < count ? to_bank_order(load32(job.row(8 * row8 + r) + word * 4)) : 0u;
    job.put_words(job.piece.dest_row + 8 * row8, word, words, count);
}

QPN_BOTH void plain_value(const Job& job, int64_t r, int64_t c) {
    const Bank& bank = job.bank();
    const int64_t n = (job.piece.dest_row + r) * bank.projections + job.parity();
    reinterpret_cast<uint16_t*>(bank.tensor[0])[(job.piece.slot * bank.n + n) * bank.k + c] =
        static_cast<uint16_t>(load16(job.row(r) + c * 2));
}

}  // namespace conversion
}  // namespace qpn
