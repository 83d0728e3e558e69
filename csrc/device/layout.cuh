// Sizes and codes shared by all native code; the Python side of each is named beside it.
#pragma once
#include "macros.cuh"

namespace qpn {
// Apart from the types of the decode kernels (qpn.cuh), which are called alike in the same library.
inline namespace layout {

// loader/bank.py
constexpr int64_t kTile = 32;        // columns of one tile
constexpr int64_t kRowsPerWord = 8;  // consecutive K in one weight word
constexpr int kNibbleOfRow[8] = {0, 4, 1, 5, 2, 6, 3, 7};
static_assert(kTile * 4 == 128, "one tile row is one 128-byte line: kernels load it as one piece");

// The nibble of an AWQ word that holds column 8 w + m: the reverse of 0, 2, 4, 6, 1, 3, 5, 7.
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

enum Kind : int64_t { kInt4 = 0, kE2m1 = 1, kPlain = 2, kAbsent = 3 };        // KINDS
enum Layout : int64_t { kCompact = 0, kRecord = 1, kWide = 2, kAsIs = 3 };    // LAYOUTS
enum ScaleDtype : int64_t { kF16 = 0, kBf16 = 1, kU8 = 2 };                   // SCALE_DTYPES
enum Sense : int64_t { kNoGlobal = 0, kMultiplier = 1, kDivisor = 2 };        // GLOBAL_SENSES

// loader/checkpoint/scheme.py
enum Role : int64_t {
    kCodesKn = 0,
    kCodesNk,
    kScalesGn,
    kScalesNg,
    kScalesNg8,
    kZerosGn,
    kZerosNg,
    kGlobalF32,
    kGlobalBf16,
    kCheckShape,
    kCheckGroups,
    kPlainNk,
    kScalesGn32 = 13,
    kScalesNg32,
    kRoles
};

// DESCRIPTOR_FIELDS of loader/pieces.py, one row of twelve int64.
struct Descriptor {
    int64_t role, bank, projection, slot, offset, rows, row_bytes, skip, cols, dest_row;
    int64_t expect_a, expect_b;
};
static_assert(sizeof(Descriptor) == 12 * 8, "a descriptor is one row of the table that Python fills");

// FIELDS of loader/reference/findings.py.
struct Finding {
    int64_t subject, kind, count, row, column, bits;
};
enum FindingKind : int64_t { kNonfinite = 0, kGlobal, kZeroPoint, kShape, kGroups, kNotHeld, kNotFp16, kNotBf16 };

// One bank: ten numbers of LayerSpec.to_ints, then the tensors with their capacities.
struct Bank {
    int64_t kind, layout, experts, k, n, group, phase, projections, scale_dtype, sense;
    uint8_t* tensor[3];
    int64_t bytes[3];

    QPN_BOTH int64_t k_padded() const { return (k + kTile - 1) / kTile * kTile; }
    QPN_BOTH int64_t n_padded() const { return (n + kTile - 1) / kTile * kTile; }
    QPN_BOTH int64_t k8() const { return k_padded() / kRowsPerWord; }
    QPN_BOTH int64_t tiles() const { return n_padded() / kTile; }
    QPN_BOTH int64_t groups() const { return (phase + k + group - 1) / group; }
    QPN_BOTH int64_t columns() const { return n / projections; }
    QPN_BOTH int64_t tile_words() const { return k8() * kTile; }
    QPN_BOTH int64_t expert_words() const { return tiles() * tile_words(); }
    QPN_BOTH int64_t plane() const { return groups() * n_padded(); }  // metadata entries of one expert
    QPN_BOTH int tensors() const {
        return kind == kAbsent ? 0 : kind == kPlain ? 1 : (layout == kCompact ? 3 : 2);
    }
};

struct Layer {
    bool fused_bias;
    Bank bank[2];
    float* cache;  // (experts, 3) fp32: globals of gate, up, down
    int64_t cache_bytes;
    QPN_BOTH bool checks_fp16() const {
        return bank[1].layout == kRecord || bank[1].layout == kWide || fused_bias;
    }
};

}  // namespace layout
}  // namespace qpn
