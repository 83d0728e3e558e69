// Included by codes_*.cpp with QPN_CODES set to the name of its table. Vector extensions carry the
// same source to every instruction set, so that all give the same bits.
#include <string.h>

#include "codes.h"
#include "../device/layout.cuh"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace qpn {
namespace {

typedef uint32_t Vec __attribute__((vector_size(32)));

inline Vec load(const uint8_t* at) {
    Vec v;
    memcpy(&v, at, sizeof v);
    return v;
}

// Bank words are not read again soon: full lines go past the cache where the machine can do so.
inline void store(uint32_t* at, Vec v) {
#ifdef __AVX2__
    _mm256_stream_si256(reinterpret_cast<__m256i*>(at), (__m256i)v);
#else
    memcpy(at, &v, sizeof v);
#endif
}

inline void fence() {
#ifdef __AVX2__
    _mm_sfence();
#endif
}

#define QPN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

inline void swap_bits(Vec& low, Vec& high, int shift, uint32_t mask) {
    const Vec t = ((low >> shift) ^ high) & mask;
    high ^= t;
    low ^= t << shift;
}

// Nibble p of v[i] becomes nibble i of v[p].
inline void transpose_nibbles(Vec v[8]) {
    for (int i = 0; i < 4; ++i) swap_bits(v[i], v[i + 4], 16, 0x0000ffffu);
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; ++j) swap_bits(v[j], v[j + 2], 8, 0x00ff00ffu);
    for (int i = 0; i < 8; i += 2) swap_bits(v[i], v[i + 1], 4, 0x0f0f0f0fu);
}

// Lane p of v[i] becomes lane i of v[p].
inline void transpose_words(Vec v[8]) {
    Vec a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = QPN_SHUFFLE(v[i], v[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = QPN_SHUFFLE(v[i], v[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; ++j) {
            b[j] = QPN_SHUFFLE(a[j], a[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[j + 2] = QPN_SHUFFLE(a[j], a[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; ++i) {
        v[i] = QPN_SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        v[i + 4] = QPN_SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

// Codes 0..7 of each word, low nibble first, to the nibbles of kNibbleOfRow.
inline Vec to_bank_order(Vec w) {
    Vec t = (w ^ (w >> 4)) & 0x00f000f0u;
    w ^= t ^ (t << 4);
    t = (w ^ (w >> 8)) & 0x0000ff00u;
    return w ^ t ^ (t << 8);
}

// Eight rows of eight AWQ words -> for each word, the eight bank words of its columns.
inline void columns_of_kn(const uint8_t* source, int64_t row_bytes, Vec out[8]) {
    Vec v[8];
    for (int j = 0; j < 8; ++j) v[kNibbleOfRow[j]] = load(source + j * row_bytes);
    transpose_nibbles(v);
    for (int m = 0; m < 8; ++m) out[m] = v[kAwqNibble[m]];
    transpose_words(out);
}

// Where the eight words of one source word go; both layouts keep them in one aligned run.
inline uint32_t* kn_dest(const CodesBlock& block, int64_t word, int64_t k8) {
    const int64_t per_tile = 4 / block.projections;
    const int64_t tile = word / per_tile, within = word % per_tile;
    return block.dest + tile * block.tile_words + k8 * kTile + within * 8 * block.projections;
}

inline void put_pair(uint32_t* at, Vec gate, Vec up) {
    store(at, QPN_SHUFFLE(gate, up, 0, 8, 1, 9, 2, 10, 3, 11));
    store(at + 8, QPN_SHUFFLE(gate, up, 4, 12, 5, 13, 6, 14, 7, 15));
}

inline void put_every_other(uint32_t* at, const Vec& words) {
    for (int m = 0; m < 8; ++m) at[2 * m] = words[m];
}

void put_kn(const CodesBlock& block, int64_t word, int64_t k8, int64_t count, const Vec* first,
            const Vec* second) {
    for (int64_t w = 0; w < count; ++w) {
        uint32_t* at = kn_dest(block, word + w, k8);
        if (second != nullptr)
            put_pair(at, first[w], second[w]);
        else if (block.projections == 2)
            put_every_other(at + block.parity, first[w]);
        else
            store(at, first[w]);
    }
}

// A ragged corner: rows or words short of eight are taken as zero codes, only real words written.
void kn_corner(const CodesBlock& block, int64_t word, int64_t count, int64_t row, int64_t rows) {
    alignas(32) uint8_t padded[2][8 * 32];
    const uint8_t* sources[2] = {block.first, block.second};
    Vec out[2][8];
    memset(padded, 0, sizeof padded);
    for (int s = 0; s < (block.second != nullptr ? 2 : 1); ++s) {
        for (int64_t r = 0; r < rows; ++r)
            memcpy(padded[s] + r * 32, sources[s] + (row + r) * block.row_bytes + word * 4,
                   static_cast<size_t>(count) * 4);
        columns_of_kn(padded[s], 32, out[s]);
    }
    put_kn(block, word, block.row0 + row / 8, count, out[0],
           block.second != nullptr ? out[1] : nullptr);
}

void kn(const CodesBlock& block) {
    const int64_t whole_rows = block.rows / 8 * 8;
    for (int64_t word = 0; word < block.words; word += 8) {
        const int64_t count = block.words - word < 8 ? block.words - word : 8;
        for (int64_t row = 0; row < block.rows; row += 8) {
            if (count < 8 || row >= whole_rows) {
                kn_corner(block, word, count, row, row < whole_rows ? 8 : block.rows - row);
                continue;
            }
            const int64_t at = row * block.row_bytes + word * 4;
            Vec first[8], second[8];
            columns_of_kn(block.first + at, block.row_bytes, first);
            if (block.second != nullptr) columns_of_kn(block.second + at, block.row_bytes, second);
            put_kn(block, word, block.row0 + row / 8, 8, first,
                   block.second != nullptr ? second : nullptr);
        }
    }
    fence();
}

// Up to eight rows of N by up to eight words of K -> for each word, the eight bank words of its k8.
inline void rows_of_nk(const uint8_t* source, int64_t row_bytes, int64_t rows, int64_t count,
                       Vec out[8]) {
    for (int64_t r = 0; r < 8; ++r) {
        Vec v = {};
        if (r < rows && count == 8)
            v = load(source + r * row_bytes);
        else if (r < rows)
            memcpy(&v, source + r * row_bytes, static_cast<size_t>(count) * 4);
        out[r] = to_bank_order(v);
    }
    transpose_words(out);
}

// Eight k8 of one tile (1 KiB, contiguous in the bank) from all source rows of the tile.
void nk_tile(const CodesBlock& block, int64_t row, int64_t rows, int64_t word, int64_t count) {
    alignas(32) uint32_t lines[8][kTile];
    const int step = block.projections;
    for (int64_t r = 0; r < rows; r += 8) {
        const int64_t some = rows - r < 8 ? rows - r : 8;
        const int64_t at = (row + r) * block.row_bytes + word * 4;
        Vec first[8], second[8];
        rows_of_nk(block.first + at, block.row_bytes, some, count, first);
        if (block.second != nullptr)
            rows_of_nk(block.second + at, block.row_bytes, some, count, second);
        for (int64_t k = 0; k < count; ++k) {
            uint32_t* line = lines[k] + r * step;
            if (block.second != nullptr) {
                const Vec low = QPN_SHUFFLE(first[k], second[k], 0, 8, 1, 9, 2, 10, 3, 11);
                const Vec high = QPN_SHUFFLE(first[k], second[k], 4, 12, 5, 13, 6, 14, 7, 15);
                memcpy(line, &low, sizeof low);
                memcpy(line + 8, &high, sizeof high);
            } else if (step == 2) {
                put_every_other(line + block.parity, first[k]);
            } else {
                memcpy(line, &first[k], sizeof first[k]);
            }
        }
    }
    const int64_t column = (block.row0 + row) * step;
    uint32_t* dest = block.dest + column / kTile * block.tile_words + word * kTile;
    const bool whole = rows * step == kTile && (step == 1 || block.second != nullptr);
    for (int64_t k = 0; k < count; ++k) {
        uint32_t* at = dest + k * kTile;
        if (whole) {
            for (int v = 0; v < 4; ++v) store(at + 8 * v, load((uint8_t*)(lines[k] + 8 * v)));
        } else {
            const int only = step == 2 && block.second == nullptr ? step : 1;
            for (int64_t c = only == 2 ? block.parity : 0; c < rows * step; c += only)
                at[c] = lines[k][c];
        }
    }
}

void nk(const CodesBlock& block) {
    const int64_t per_tile = kTile / block.projections;
    for (int64_t row = 0; row < block.rows; row += per_tile) {
        const int64_t rows = block.rows - row < per_tile ? block.rows - row : per_tile;
        for (int64_t word = 0; word < block.words; word += 8)
            nk_tile(block, row, rows, word, block.words - word < 8 ? block.words - word : 8);
    }
    fence();
}

}  // namespace

extern const CodesKernels QPN_CODES;
const CodesKernels QPN_CODES = {QPN_CODES_NAME, kn, nk};

}  // namespace qpn
