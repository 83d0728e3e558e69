// The bank as device code sees it: constants of the layout and index maths, without one CUDA word,
// so that g++ compiles it for the tests. loader/bank.py and csrc/host/layout.h hold the same
// values.
#pragma once
#include "macros.cuh"

namespace qpn {

constexpr int kTile = 32;        // columns of one tile
constexpr int kRowsPerWord = 8;  // consecutive K in one weight word
constexpr int kNibbleOfRow[8] = {0, 4, 1, 5, 2, 6, 3, 7};
static_assert(kTile * 4 == 128, "one tile row is one 128-byte line: a warp loads it as one piece");
static_assert(kNibbleOfRow[1] == kNibbleOfRow[0] + 4,
              "rows j and j + 1 are the halves of one mask");

enum Kind : int { kInt4 = 0, kE2m1 = 1, kPlain = 2 };                   // KINDS
enum Layout : int { kCompact = 0, kRecord = 1, kWide = 2, kAsIs = 3 };  // LAYOUTS
enum ScaleDtype : int { kF16 = 0, kBf16 = 1, kU8 = 2 };                 // SCALE_DTYPES
enum Sense : int { kNoGlobal = 0, kMultiplier = 1, kDivisor = 2 };      // GLOBAL_SENSES
enum Float : int { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2, kFloat64 = 3 };
enum Family : int { kHost = 0, kQuadpair = 1, kM16n8k16 = 2 };  // FAMILIES

// What a warp takes at a time: blocks of 32 rows, four of them a chunk.
constexpr int kBlockRows = 32;
constexpr int kChunkBlocks = 4;
constexpr int kChunkRows = kBlockRows * kChunkBlocks;
constexpr int kChunkBytes = kChunkRows / kRowsPerWord * kTile * 4;  // words of a chunk of one tile
constexpr int kSegmentRows = 16;  // group and phase are multiples of it
constexpr int kPassRows = 8;      // activation rows that one pass over an expert serves
constexpr int kPitch = 36;  // floats of a row of partial sums: 32 columns, skewed over the banks

// One bank. `seg_magic`, 2^31 over the group rounded up, divides segments by it: exact below 2^15
// segments (2^19 rows) and groups.
struct Bank {
    const uint32_t* words;
    const uint8_t* plane;   // scales, records or wide metadata
    const uint8_t* second;  // zero points (int4 compact) or globals (e2m1 compact), else null
    int32_t kind, layout, scale_dtype, sense;
    int32_t experts, k, n, blocks, tiles, groups, projections;
    int32_t phase_segments, group_segments;
    int32_t row_entries;  // columns of a metadata row, Np
    int32_t entry_bytes;  // of `plane`, for one group and column
    uint32_t seg_magic;

    QPN_BOTH int64_t np() const { return int64_t(tiles) * kTile; }
    QPN_BOTH int32_t columns() const { return n / projections; }
    QPN_BOTH int32_t chunks() const { return (blocks + kChunkBlocks - 1) / kChunkBlocks; }

    // Group of a segment of 16 rows, clamped to the last.
    QPN_BOTH int32_t group_of(int32_t segment) const {
        const uint32_t twice = uint32_t(segment + phase_segments) * 2;
        const int32_t group = int32_t((uint64_t(twice) * seg_magic) >> 32);
        return group < groups ? group : groups - 1;
    }
    // Words of one tile of one expert: contiguous, `blocks` x 4 rows of 32.
    QPN_BOTH int64_t tile_at(int64_t slot, int64_t tile) const {
        return (slot * tiles + tile) * (int64_t(blocks) * (kBlockRows / kRowsPerWord) * kTile);
    }
};

// Fills what follows from the logical sizes; false where they are out of range.
QPN_BOTH bool shape_bank(Bank& bank, int64_t experts, int64_t k, int64_t n, int64_t group,
                         int64_t phase, int64_t projections) {
    const int64_t most = int64_t(1) << 19;
    if (experts < 1 || experts > most || k < 1 || k > most || n < 1 || n > most) return false;
    if (group < kSegmentRows || group % kSegmentRows || phase < 0 || phase % kSegmentRows)
        return false;
    if (phase >= group || projections < 1 || projections > 2 || n % projections) return false;
    bank.experts = int32_t(experts);
    bank.k = int32_t(k);
    bank.n = int32_t(n);
    bank.projections = int32_t(projections);
    bank.blocks = int32_t((k + kBlockRows - 1) / kBlockRows);
    bank.tiles = int32_t((n + kTile - 1) / kTile);
    // A group longer than all rows is one group: its exact length does not matter.
    const int64_t rows = phase + int64_t(bank.blocks) * kBlockRows;
    const int64_t kept =
        group < rows ? group : (rows + kSegmentRows - 1) / kSegmentRows * kSegmentRows;
    bank.row_entries = bank.tiles * kTile;
    bank.groups = int32_t((phase + k + group - 1) / group);
    bank.group_segments = int32_t(kept / kSegmentRows);
    bank.phase_segments = int32_t(phase / kSegmentRows);
    const uint64_t whole = uint64_t(1) << 31;
    bank.seg_magic = uint32_t((whole + bank.group_segments - 1) / bank.group_segments);
    return rows / kSegmentRows < 32768;
}

}  // namespace qpn
