// One piece of the payload as a kernel takes it, and what its units of work share.
#pragma once
#include "floats.cuh"
#include "spots.cuh"

namespace qpn {
inline namespace conversion {

// A descriptor as a kernel takes it: so small that a batch travels in the kernel's parameters.
struct Piece {
    int64_t offset;     // of the first used byte in the chunk
    int64_t row_bytes;
    int32_t rows, cols;
    int32_t dest_row, slot;
    int32_t expect_a, expect_b;
    uint32_t first_block;
    uint8_t role, bank, projection, reserved;
};
static_assert(sizeof(Piece) == 48, "a batch of pieces must fit into the parameters of a kernel");

// Tensors lie in a file at any byte: whole words are loaded only where they are aligned.
QPN_BOTH uint32_t load16(const uint8_t* at) {
    if (reinterpret_cast<uintptr_t>(at) % 2 == 0) return *reinterpret_cast<const uint16_t*>(at);
    return at[0] | static_cast<uint32_t>(at[1]) << 8;
}
QPN_BOTH uint32_t load32(const uint8_t* at) {
    if (reinterpret_cast<uintptr_t>(at) % 4 == 0) return *reinterpret_cast<const uint32_t*>(at);
    return load16(at) | load16(at + 2) << 16;
}
QPN_BOTH int64_t load64(const uint8_t* at) {
    return static_cast<int64_t>(load32(at) | static_cast<uint64_t>(load32(at + 4)) << 32);
}

// The nibble that holds row j of a bank word, and column m of a word that packs along N.
QPN_BOTH int nibble_of(int j) { return j / 2 + j % 2 * 4; }

// One piece with everything that its units share.
struct Job {
    const Piece& piece;
    const uint8_t* source;  // first used byte
    const Layer& layer;
    Tally* tally;

    QPN_BOTH const Bank& bank() const { return layer.bank[piece.bank]; }
    QPN_BOTH int64_t parity() const { return bank().projections == 2 ? piece.projection : 0; }
    QPN_BOTH const uint8_t* row(int64_t r) const { return source + r * piece.row_bytes; }
    // Entry of a metadata plane for a group and a column of this projection.
    QPN_BOTH int64_t entry(int64_t group, int64_t column) const {
        return piece.slot * bank().plane() + group * bank().n_padded() +
               column * bank().projections + parity();
    }
    // Several values, the first of which has that rank; then one.
    QPN_BOTH void wrong_first(FindingKind kind, unsigned long long count, unsigned long long rank,
                              int64_t bits) const {
        hit(tally, spot_of(kind, piece.projection, piece.slot, bank().experts), count, rank, bits);
    }
    QPN_BOTH void wrong(FindingKind kind, int64_t row, int64_t column, int64_t bits) const {
        wrong_first(kind, 1, rank_of(row, column), bits);
    }
    // Eight words of one k8, for eight columns of this projection from `column` on.
    QPN_BOTH void put_words(int64_t column, int64_t k8, const uint32_t words[8], int64_t count) const {
        const int64_t first = column * bank().projections + parity();
        uint32_t* at = reinterpret_cast<uint32_t*>(bank().tensor[0]) +
                       piece.slot * bank().expert_words() + first / kTile * bank().tile_words() +
                       k8 * kTile + first % kTile;
        const int64_t step = bank().projections;
        for (int m = 0; m < 8; ++m)
            if (m < count) at[m * step] = words[m];
    }
};

}  // namespace conversion
}  // namespace qpn
