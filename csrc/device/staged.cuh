// Activations of a pass in shared memory, as digits (digits.cuh): up to eight rows, each 128
// numbers with one scale.
#pragma once
#include "digits.cuh"
#include "turn.cuh"

namespace qpn {

// In bytes from the start: 16 of zeros twice, rows, then notes.
//   a row: of each chunk kDigitBytes, 16 at ((block / 2 * 2 + digit) * 4 + k8) * 16, of each 8 for
//   block % 2
//   notes: of each chunk and row `note_bytes`: the scale, from StagedSums::kAt on sums of the
//   digits
constexpr int kZeroBytes = kDigitBytes / 2 + 16;
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

// By the warps that multiply: `rows` rows of `k` numbers, the r-th from `from(r)` on, and zeros up
// to the end of the last chunk. Sixteen lanes share a chunk.
template <class Act, class Sums, class From>
QPN_DEVICE void stage_rows(uint32_t to, const StagedLayout& at, int32_t rows, int32_t chunks,
                           int32_t k, From from) {
    const uint32_t vectors = chunks * (kChunkRows / 8), all = rows * vectors;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < (all + 31) / 32 * 32; i += kMultiplyThreads) {
        const uint32_t row = i / vectors, place = i - row * vectors;
        Vector v{0, 0, 0, 0};
        if (i < all && int32_t(place * 8) < k) v = load_activations(from(row) + place * 8);
        const EightDigits own = to_digits<Act, kInt4, 16>(v);
        int32_t sum = own.sum;
#pragma unroll
        for (int d = 1; d < Sums::kLanes; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (i >= all) continue;
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
}

}  // namespace qpn
