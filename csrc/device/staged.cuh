// Activations of a pass in shared memory, as digits (digits.cuh): up to eight rows, each 128
// numbers with one scale.
#pragma once
#include "digits.cuh"
#include "turn.cuh"

namespace qpn {

// In bytes from the start: zeros for a chunk of one row, rows, then notes.
//   a row: of each chunk kDigitBytes, 16 at ((block / 2 * 2 + digit) * 4 + k8) * 16, of each 8 for
//   block % 2
//   notes: of each chunk and row `note_bytes`: the scale, from StagedSums::kAt on sums of the
//   digits
constexpr int kZeroBytes = kDigitBytes;
struct StagedLayout {
    int32_t rows, row, notes, bytes;
    QPN_BOTH StagedLayout(int32_t chunks, int32_t note_bytes) {
        rows = kZeroBytes;
        row = chunks * kDigitBytes;
        notes = rows + kPassRows * row;
        bytes = notes + chunks * kPassRows * note_bytes;
    }
};

// Sums of the digits of `kRows` rows each: what a zero point multiplies.
template <int kRows>
struct StagedSums {
    static constexpr int kLanes = kRows / 8;  // that share one
    static constexpr int kAt = kRows == kChunkRows ? 4 : 16;
    static constexpr int kNote = kAt + kChunkRows / kRows * 4;
};

// One vector of eight numbers to its place in a row; sixteen lanes share a chunk. Nothing is
// written where `valid` is false, but every lane takes part.
template <class Act, class Sums>
QPN_DEVICE void stage_vector(uint32_t to, const StagedLayout& at, uint32_t row, uint32_t place,
                             const Vector& v, bool valid) {
    const EightDigits own = to_digits<Act, kInt4, 16>(v);
    int32_t sum = own.sum;
#pragma unroll
    for (int d = 1; d < Sums::kLanes; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (!valid) return;
    const uint32_t chunk = place / 16, block = place / 4 % 4, k8 = place % 4;
    const uint32_t digits = to + at.rows + row * at.row + chunk * kDigitBytes +
                            (block / 2 * 2 * 4 + k8) * 16 + block % 2 * 8;
    write_pair(digits, own.high[0], own.high[1]);
    write_pair(digits + 64, own.low[0], own.low[1]);
    const uint32_t note = to + at.notes + (chunk * kPassRows + row) * Sums::kNote;
    if (place % 16 == 0) write_word(note, __float_as_uint(own.scale));
    if (place % Sums::kLanes == 0)
        write_word(note + Sums::kAt + place % 16 / Sums::kLanes * 4, uint32_t(sum));
}

// By the warps that multiply: `rows` rows of `k` numbers, the r-th from `from(r)` on, and zeros up
// to the end of the last chunk. Several vectors are on their way at once.
template <class Act, class Sums, class From>
QPN_DEVICE void stage_rows(uint32_t to, const StagedLayout& at, int32_t rows, int32_t chunks,
                           int32_t k, From from) {
    constexpr int kAtOnce = 4;
    const uint32_t vectors = chunks * (kChunkRows / 8), all = rows * vectors;
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < (all + 31) / 32 * 32;
         first += kAtOnce * kMultiplyThreads) {
        Vector v[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const uint32_t i = first + n * kMultiplyThreads, row = i / vectors;
            v[n] = Vector{0, 0, 0, 0};
            if (i < all && int32_t((i - row * vectors) * 8) < k)
                v[n] = load_activations(from(row) + (i - row * vectors) * 8);
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const uint32_t i = first + n * kMultiplyThreads, row = i / vectors;
            if (i - threadIdx.x % 32 >= all) break;
            stage_vector<Act, Sums>(to, at, row, i - row * vectors, v[n], i < all);
        }
    }
}

}  // namespace qpn
