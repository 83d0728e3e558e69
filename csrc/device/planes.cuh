// Scales, zero points and globals of a source to the planes of a bank.
#pragma once
#include "pieces.cuh"

namespace qpn {
inline namespace conversion {

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

// One scale of 32 bits: its place, and its value.
struct WideScale {
    int64_t group, column;
    float value;
};
QPN_BOTH WideScale wide_scale(const Job& job, uint32_t unit) {
    const Piece& piece = job.piece;
    const bool by_column = piece.role == kScalesNg32;
    const uint32_t width = static_cast<uint32_t>(by_column ? piece.rows : piece.cols);
    const uint32_t slow = unit / width, fast = unit % width;
    const int64_t row = by_column ? fast : slow, col = by_column ? slow : fast;
    const float value = from_bits(load32(job.row(row) + col * 4));
    if (by_column) return {col, piece.dest_row + row, value};
    return {piece.dest_row + row, col, value};
}

// Stored in 16 bits: as the bank's format says, or as its layout.
QPN_BOTH void scale_of_32(const Job& job, const WideScale& one) {
    const Bank& bank = job.bank();
    const bool checks = job.layer.checks_fp16();
    const uint16_t half = to_half(one.value);
    const bool broken = !finite(one.value);
    if (broken || (checks && !(held_by_half(one.value) && from_half(half) == one.value)))
        job.wrong(broken ? kNonfinite : kNotHeld, one.group, one.column,
                  static_cast<int32_t>(to_bits(one.value)));
    const bool turns = !checks && job.tally->format[job.piece.bank] != kInFp16;
    const bool brain = bank.layout == kCompact && (bank.scale_dtype == kBf16 || turns);
    const int64_t bytes = bank.layout == kCompact ? 2 : bank.layout == kRecord ? 3 : 4;
    put_bytes(bank.tensor[1] + job.entry(one.group, one.column) * bytes,
              brain ? to_bf16(one.value) : half, 2);
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

}  // namespace conversion
}  // namespace qpn
