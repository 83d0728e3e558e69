// Source bytes of one chunk into bank words and metadata, in place, one unit of work at a time.
//
// Units of one piece write bytes of their own, in any order, so a card runs them all at once and
// g++ in a loop. Nothing is parked as on the host: where two tensors share a byte of zero points,
// each sets its own nibble.
#pragma once
#include "layout.cuh"
#include "floats.cuh"

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

// What was found wrong of one kind in one tensor; `rank` grows towards the first in row-major order.
struct Spot {
    unsigned long long count, rank;
    long long bits;
    int lock, reserved;
};
static_assert(sizeof(Spot) == 32, "SPOT of loader/spots.py");

// Spot 0 counts all; then kind x projection x slot for pieces; then bank x slot for the closing pass.
constexpr int64_t kPieceKinds = 6, kProjections = 3;
QPN_BOTH int64_t spots_of(int64_t experts) { return 1 + (kPieceKinds * kProjections + 2) * experts; }
QPN_BOTH int64_t spot_of(int64_t kind, int64_t projection, int64_t slot, int64_t experts) {
    return 1 + (kind * kProjections + projection) * experts + slot;
}
QPN_BOTH int64_t closing_spot_of(int64_t bank, int64_t slot, int64_t experts) {
    return 1 + (kPieceKinds * kProjections + bank) * experts + slot;
}

QPN_BOTH void hit(Spot* spots, int64_t at, int64_t row, int64_t column, int64_t bits) {
    const unsigned long long rank =
        ~(static_cast<unsigned long long>(row) << 32 | static_cast<unsigned long long>(column));
    Spot& spot = spots[at];
#ifdef __CUDA_ARCH__
    atomicAdd(&spots[0].count, 1ull);
    atomicAdd(&spot.count, 1ull);
    volatile unsigned long long* best = &spot.rank;
    for (bool settled = rank <= *best; !settled;)
        if (atomicCAS(&spot.lock, 0, 1) == 0) {
            __threadfence();
            if (rank > *best) {
                *best = rank;
                *static_cast<volatile long long*>(&spot.bits) = bits;
            }
            __threadfence();
            atomicExch(&spot.lock, 0);
            settled = true;
        }
#else
    ++spots[0].count;
    ++spot.count;
    if (rank > spot.rank) spot.rank = rank, spot.bits = bits;
#endif
}

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

// One piece with everything that its units share.
struct Job {
    const Piece& piece;
    const uint8_t* source;  // first used byte
    const Layer& layer;
    Spot* spots;

    QPN_BOTH const Bank& bank() const { return layer.bank[piece.bank]; }
    QPN_BOTH int64_t parity() const { return bank().projections == 2 ? piece.projection : 0; }
    QPN_BOTH const uint8_t* row(int64_t r) const { return source + r * piece.row_bytes; }
    // Entry of a metadata plane for a group and a column of this projection.
    QPN_BOTH int64_t entry(int64_t group, int64_t column) const {
        return piece.slot * bank().plane() + group * bank().n_padded() +
               column * bank().projections + parity();
    }
    QPN_BOTH void wrong(FindingKind kind, int64_t row, int64_t column, int64_t bits) const {
        hit(spots, spot_of(kind, piece.projection, piece.slot, bank().experts), row, column, bits);
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

// The nibble that holds row j of a bank word, and column m of a word that packs along N.
QPN_BOTH int nibble_of(int j) { return j / 2 + j % 2 * 4; }

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

QPN_BOTH void put_bytes(uint8_t* at, uint32_t value, int count) {
    for (int i = 0; i < count; ++i) at[i] = static_cast<uint8_t>(value >> (8 * i));
}

// One 16-bit scale.
QPN_BOTH void scale(const Job& job, int64_t group, int64_t column, uint32_t bits) {
    const Bank& bank = job.bank();
    const uint32_t special = bank.scale_dtype == kBf16 ? 0x7f80u : 0x7c00u;
    const bool broken = (bits & special) == special, checks = job.layer.checks_fp16();
    if (broken) job.wrong(kNonfinite, group, column, static_cast<int16_t>(bits));
    if (bank.layout == kCompact && !checks) {
        reinterpret_cast<uint16_t*>(bank.tensor[1])[job.entry(group, column)] =
            static_cast<uint16_t>(bits);
        return;
    }
    const uint16_t word = static_cast<uint16_t>(bits);
    const float value = bank.scale_dtype == kBf16 ? from_bf16(word) : from_half(word);
    const uint16_t half = to_half(value);
    if (checks && !broken && !(held_by_half(value) && from_half(half) == value))
        job.wrong(kNotHeld, group, column, static_cast<int16_t>(bits));
    const int64_t bytes = bank.layout == kCompact ? 2 : bank.layout == kRecord ? 3 : 4;
    put_bytes(bank.tensor[1] + job.entry(group, column) * bytes,
              bank.layout == kCompact ? bits : half, 2);
}

QPN_BOTH void block_scale(const Job& job, int64_t group, int64_t column, uint8_t byte) {
    if ((byte & 0x7fu) == 0x7fu) job.wrong(kNonfinite, group, column, byte);
    const int64_t bytes = job.bank().layout == kCompact ? 1 : 2;
    job.bank().tensor[1][job.entry(group, column) * bytes] = byte;
}

// Sets one nibble of each of four neighbouring bytes: the other ones are another tensor's.
QPN_BOTH void set_nibbles(uint32_t* at, uint32_t nibbles, int shift) {
#ifdef __CUDA_ARCH__
    atomicAnd(at, ~(0x0f0f0f0fu << shift));
    atomicOr(at, nibbles << shift);
#else
    *at = (*at & ~(0x0f0f0f0fu << shift)) | nibbles << shift;
#endif
}

// Eight zero points of one group, for eight columns of this projection from `column` on.
QPN_BOTH void zeros(const Job& job, int64_t group, int64_t column, const uint8_t zero[8]) {
    const Bank& bank = job.bank();
    for (int m = 0; m < 8; ++m)
        if (job.piece.expect_a >= 0 && zero[m] != job.piece.expect_a)
            job.wrong(kZeroPoint, group, column + m, zero[m]);
    if (bank.layout != kCompact) {
        const int64_t bytes = bank.layout == kRecord ? 3 : 4;
        for (int m = 0; m < 8; ++m)
            bank.tensor[1][job.entry(group, column + m) * bytes + 2] = zero[m];
        return;
    }
    uint8_t* at = bank.tensor[2] + (job.entry(group, column) - job.parity()) / 2;
    if (bank.projections == 1) {
        for (int m = 0; m < 4; ++m) at[m] = static_cast<uint8_t>(zero[2 * m] | zero[2 * m + 1] << 4);
        return;
    }
    for (int w = 0; w < 2; ++w) {
        uint32_t nibbles = 0;
        for (int m = 0; m < 4; ++m) nibbles |= static_cast<uint32_t>(zero[4 * w + m]) << (8 * m);
        set_nibbles(reinterpret_cast<uint32_t*>(at) + w, nibbles, job.parity() ? 4 : 0);
    }
}

QPN_BOTH void zeros_of_word(const Job& job, int64_t group, int64_t column, uint32_t word, bool along_n) {
    uint8_t zero[8];
#pragma unroll
    for (int m = 0; m < 8; ++m)
        zero[m] = static_cast<uint8_t>(word >> (4 * (along_n ? nibble_of(m) : m)) & 0xfu);
    zeros(job, group, column, zero);
}

// Positive and finite, and as a divisor one with a finite reciprocal.
QPN_BOTH bool usable_global(const Bank& bank, float value) {
    return finite(value) && value > 0 && (bank.sense != kDivisor || finite(1.0f / value));
}

QPN_BOTH void global_scale(const Job& job, bool bf16) {
    const Bank& bank = job.bank();
    const float value = bf16 ? from_bf16(static_cast<uint16_t>(load16(job.source)))
                             : from_bits(load32(job.source));
    if (!usable_global(bank, value)) job.wrong(kGlobal, 0, 0, static_cast<int32_t>(to_bits(value)));
    if (bank.layout == kCompact)
        reinterpret_cast<float*>(bank.tensor[2])[job.piece.slot * bank.projections + job.parity()] =
            value;
    else
        job.layer.cache[job.piece.slot * 3 + job.piece.projection] = value;
}

QPN_BOTH void check_shape(const Job& job) {
    for (int i = 0; i < 2; ++i) {
        const int64_t value = load64(job.source + 8 * i);
        if (value != (i == 0 ? job.piece.expect_a : job.piece.expect_b))
            job.wrong(kShape, 0, i, value);
    }
}

QPN_BOTH void check_groups(const Job& job) {
    bool unset = true;
    for (int64_t i = 0; unset && i < job.piece.cols; ++i)
        unset = load32(job.source + 4 * i) == 0xffffffffu;
    for (int64_t i = 0; !unset && i < job.piece.cols; ++i) {
        const int32_t value = static_cast<int32_t>(load32(job.source + 4 * i));
        if (value != i / job.piece.expect_a) job.wrong(kGroups, 0, i, value);
    }
}

QPN_BOTH void plain_value(const Job& job, int64_t r, int64_t c) {
    const Bank& bank = job.bank();
    const int64_t n = (job.piece.dest_row + r) * bank.projections + job.parity();
    reinterpret_cast<uint16_t*>(bank.tensor[0])[(job.piece.slot * bank.n + n) * bank.k + c] =
        static_cast<uint16_t>(load16(job.row(r) + c * 2));
}

// Along which the units of a role run fastest: what neighbouring units read or write together.
QPN_BOTH int64_t fast_units(const Piece& piece) {
    switch (piece.role) {
        case kCodesKn:
        case kCodesNk:
        case kZerosGn: return piece.cols / 8;
        case kScalesNg:
        case kScalesNg8:
        case kZerosNg: return piece.rows;
        case kScalesGn:
        case kPlainNk: return piece.cols;
        default: return 1;
    }
}

QPN_BOTH int64_t units_of(const Piece& piece) {
    switch (piece.role) {
        case kCodesKn:
        case kCodesNk: return (static_cast<int64_t>(piece.rows) + 7) / 8 * fast_units(piece);
        case kScalesNg:
        case kScalesNg8:
        case kZerosNg: return fast_units(piece) * piece.cols;
        case kZerosGn:
        case kScalesGn:
        case kPlainNk: return fast_units(piece) * piece.rows;
        default: return 1;
    }
}

QPN_BOTH void convert_unit(const Job& job, uint32_t unit) {
    const Piece& piece = job.piece;
    const uint32_t width = static_cast<uint32_t>(fast_units(piece));
    const int64_t slow = unit / width, fast = unit % width;
    switch (piece.role) {
        case kCodesKn: return codes_kn(job, slow, fast);
        case kCodesNk: return codes_nk(job, slow, fast);
        case kScalesGn:
            return scale(job, piece.dest_row + slow, fast, load16(job.row(slow) + fast * 2));
        case kScalesNg:
            return scale(job, slow, piece.dest_row + fast, load16(job.row(fast) + slow * 2));
        case kScalesNg8:
            return block_scale(job, slow, piece.dest_row + fast, job.row(fast)[slow]);
        case kZerosGn:
            return zeros_of_word(job, piece.dest_row + slow, 8 * fast,
                                 load32(job.row(slow) + fast * 4), true);
        case kZerosNg:
            return zeros_of_word(job, slow, piece.dest_row + 8 * fast,
                                 load32(job.row(fast) + slow * 4), false);
        case kGlobalF32: return global_scale(job, false);
        case kGlobalBf16: return global_scale(job, true);
        case kCheckShape: return check_shape(job);
        case kCheckGroups: return check_groups(job);
        case kPlainNk: return plain_value(job, slow, fast);
        default: return;
    }
}

// Whether a bank needs a closing pass on a card at all.
QPN_BOTH bool closes(const Layer& layer, const Bank& bank) {
    return bank.kind == kInt4 ? layer.checks_fp16() : bank.kind == kE2m1 && bank.layout == kWide;
}

// The closing pass of one entry of an int4 plane: its bias, or the check that it has one.
QPN_BOTH void close_int4(const Bank& bank, int64_t number, int64_t slot, int64_t group, int64_t n,
                       Spot* spots) {
    const int64_t entry = slot * bank.plane() + group * bank.n_padded() + n;
    const int64_t bytes = bank.layout == kCompact ? 2 : bank.layout == kRecord ? 3 : 4;
    uint8_t* at = bank.tensor[1] + entry * bytes;
    uint16_t half = static_cast<uint16_t>(load16(at));
    if (bank.layout == kCompact && bank.scale_dtype == kBf16) half = to_half(from_bf16(half));
    const uint8_t zero =
        bank.layout == kCompact ? bank.tensor[2][entry / 2] >> (entry % 2 * 4) & 0xf : at[2];
    const float value = from_half(half);
    // 4 bits times 11 bits is exact in fp32, rounded once
    const uint16_t bias = to_half(static_cast<float>(0 - zero) * value);
    if ((bias & 0x7c00u) == 0x7c00u && finite(value))
        hit(spots, closing_spot_of(number, slot, bank.experts), group, n, static_cast<int16_t>(half));
    if (bank.layout == kWide) put_bytes(at + 2, bias, 2);
}

QPN_BOTH void close_e2m1(const Layer& layer, int64_t number, int64_t slot, int64_t group, int64_t n,
                         Spot* spots) {
    const Bank& bank = layer.bank[number];
    const float* whole = layer.cache + slot * 3 + (number == 0 ? 0 : 2);
    uint8_t* at = bank.tensor[1] + (slot * bank.plane() + group * bank.n_padded() + n) * 2;
    const float block = from_e4m3(at[0]);
    const float global = whole[bank.projections == 2 ? n % 2 : 0];
    const float value = bank.sense == kDivisor ? block / global : block * global;
    // What was found in block scales and globals before is not found again.
    if (!held_by_half(value) && finite(block) && usable_global(bank, global))
        hit(spots, closing_spot_of(number, slot, bank.experts), group, n,
            static_cast<int32_t>(to_bits(value)));
    put_bytes(at, to_half(value), 2);
}

// Entry `unit` of experts x groups x N of one bank.
QPN_BOTH void close_unit(const Layer& layer, int64_t number, int64_t unit, Spot* spots) {
    const Bank& bank = layer.bank[number];
    const int64_t n = unit % bank.n, row = unit / bank.n;
    const int64_t group = row % bank.groups(), slot = row / bank.groups();
    if (bank.kind == kInt4)
        close_int4(bank, number, slot, group, n, spots);
    else
        close_e2m1(layer, number, slot, group, n, spots);
}

}  // namespace conversion
}  // namespace qpn
