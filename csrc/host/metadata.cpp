#include "metadata.h"

#include <string.h>

#include "../device/floats.cuh"

namespace qpn {
namespace {

template <class T>
T read(const uint8_t* at) {
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}

float scale_value(uint16_t bits, int64_t dtype) {
    return dtype == kBf16 ? from_bf16(bits) : from_half(bits);
}

// Where entry (group, projection column 0) of one expert's plane lies, in entries.
int64_t plane_entry(const Bank& bank, const Descriptor& piece, int64_t group, int64_t column) {
    const int64_t parity = bank.projections == 2 ? piece.projection : 0;
    return piece.slot * bank.plane() + group * bank.n_padded() + column * bank.projections + parity;
}

void put_scale(const Bank& bank, int64_t entry, uint16_t bits) {
    if (bank.layout == kCompact)
        memcpy(bank.tensor[1] + entry * 2, &bits, 2);
    else
        memcpy(bank.tensor[1] + entry * (bank.layout == kRecord ? 3 : 4), &bits, 2);
}

// 16-bit scales; (row, column) of the source is (group, n) or, transposed, (n, group).
void scales(const Descriptor& piece, const uint8_t* source, const Layer& layer, bool by_column,
            Findings& findings) {
    const Bank& bank = layer.bank[piece.bank];
    const uint32_t special = bank.scale_dtype == kBf16 ? 0x7f80u : 0x7c00u;
    const bool checks = layer.checks_fp16(), converts = bank.layout != kCompact;
    Bad nonfinite, not_held;
    for (int64_t r = 0; r < piece.rows; ++r) {
        const uint8_t* row = source + r * piece.row_bytes + piece.skip;
        const int64_t first = by_column ? plane_entry(bank, piece, 0, piece.dest_row + r)
                                        : plane_entry(bank, piece, piece.dest_row + r, 0);
        const int64_t step = by_column ? bank.n_padded() : bank.projections;
        for (int64_t c = 0; c < piece.cols; ++c) {
            uint16_t bits = read<uint16_t>(row + c * 2);
            const bool broken = (bits & special) == special;
            const int64_t group = by_column ? c : piece.dest_row + r;
            const int64_t column = by_column ? piece.dest_row + r : c;
            if (broken) nonfinite.hit(group, column, (int16_t)bits);
            if (checks || converts) {
                const float value = scale_value(bits, bank.scale_dtype);
                const uint16_t half = to_half(value);
                if (checks && !broken && !(held_by_half(value) && from_half(half) == value))
                    not_held.hit(group, column, (int16_t)bits);
                if (converts) bits = half;
            }
            put_scale(bank, first + c * step, bits);
        }
    }
    nonfinite.report(findings, kNonfinite);
    not_held.report(findings, kNotHeld);
}

// fp32 scales, stored in the 16 bits of the plane; which formats hold them exactly is reported.
void fp32_scales(const Descriptor& piece, const uint8_t* source, const Layer& layer, bool by_column,
                 Findings& findings) {
    const Bank& bank = layer.bank[piece.bank];
    const bool checks = layer.checks_fp16();
    const bool to_fp16 = bank.layout != kCompact || bank.scale_dtype != kBf16;
    Bad nonfinite, not_held, not_fp16, not_bf16;
    for (int64_t r = 0; r < piece.rows; ++r) {
        const uint8_t* row = source + r * piece.row_bytes + piece.skip;
        for (int64_t c = 0; c < piece.cols; ++c) {
            const float value = read<float>(row + c * 4);
            const int64_t group = by_column ? c : piece.dest_row + r;
            const int64_t column = by_column ? piece.dest_row + r : c;
            const int32_t bits = static_cast<int32_t>(to_bits(value));
            const uint16_t half = to_half(value), brain = to_bf16(value);
            const bool in_fp16 = from_half(half) == value;
            if (!finite(value)) {
                nonfinite.hit(group, column, bits);
            } else if (checks) {
                if (!in_fp16 || !held_by_half(value)) not_held.hit(group, column, bits);
            } else {
                if (!in_fp16) not_fp16.hit(group, column, bits);
                if (from_bf16(brain) != value) not_bf16.hit(group, column, bits);
            }
            put_scale(bank, plane_entry(bank, piece, group, column), to_fp16 ? half : brain);
        }
    }
    nonfinite.report(findings, kNonfinite);
    not_held.report(findings, kNotHeld);
    not_fp16.report(findings, kNotFp16);
    not_bf16.report(findings, kNotBf16);
}

// The usual case of `scales` for compact planes: whole rows, no conversion, one test at the end.
void scales_compact(const Descriptor& piece, const uint8_t* source, const Layer& layer,
                    Findings& findings) {
    const Bank& bank = layer.bank[piece.bank];
    const uint16_t special = bank.scale_dtype == kBf16 ? 0x7f80u : 0x7c00u;
    uint16_t* plane = reinterpret_cast<uint16_t*>(bank.tensor[1]);
    unsigned broken = 0;
    for (int64_t r = 0; r < piece.rows; ++r) {
        const uint8_t* row = source + r * piece.row_bytes + piece.skip;
        uint16_t* dest = plane + plane_entry(bank, piece, piece.dest_row + r, 0);
        const int64_t step = bank.projections;
        for (int64_t c = 0; c < piece.cols; ++c) {
            const uint16_t bits = read<uint16_t>(row + c * 2);
            broken |= (bits & special) == special;
            dest[c * step] = bits;
        }
    }
    if (broken) scales(piece, source, layer, false, findings);
}

// e4m3 bytes (n, group) to a byte plane (group, n), sixteen source rows at a time.
void block_scales(const Descriptor& piece, const uint8_t* source, const Layer& layer,
                  Findings& findings) {
    const Bank& bank = layer.bank[piece.bank];
    const int64_t entry_bytes = bank.layout == kCompact ? 1 : 2;
    const int64_t across = bank.n_padded() * entry_bytes, step = bank.projections * entry_bytes;
    Bad nonfinite;
    constexpr int64_t kBlock = 16;
    for (int64_t r0 = 0; r0 < piece.rows; r0 += kBlock) {
        const int64_t rows = piece.rows - r0 < kBlock ? piece.rows - r0 : kBlock;
        uint8_t* dest =
            bank.tensor[1] + plane_entry(bank, piece, 0, piece.dest_row + r0) * entry_bytes;
        for (int64_t c = 0; c < piece.cols; ++c) {
            const uint8_t* at = source + r0 * piece.row_bytes + piece.skip + c;
            uint8_t* line = dest + c * across;
            for (int64_t r = 0; r < rows; ++r) {
                const uint8_t byte = at[r * piece.row_bytes];
                if ((byte & 0x7fu) == 0x7fu) nonfinite.hit(c, piece.dest_row + r0 + r, byte);
                line[r * step] = byte;
            }
        }
    }
    nonfinite.report(findings, kNonfinite);
}

// One zero point to where it waits for `finish` (or stays, where one tensor has both columns).
struct ZeroPoints {
    const Bank& bank;
    const Descriptor& piece;
    Bad unexpected;

    void put(int64_t group, int64_t column, uint8_t zero) {
        if (piece.expect_a >= 0 && zero != piece.expect_a) unexpected.hit(group, column, zero);
        if (bank.layout == kCompact) {
            const int64_t parity = bank.projections == 2 ? piece.projection : 0;
            const int64_t at = parity * bank.columns() + column;
            uint8_t* byte = bank.tensor[2] + (piece.slot * bank.groups() + group) *
                                                 (bank.n_padded() / 2) + at / 2;
            *byte = at % 2 ? static_cast<uint8_t>((*byte & 0x0f) | zero << 4)
                           : static_cast<uint8_t>((*byte & 0xf0) | zero);
        } else {
            const int64_t bytes = bank.layout == kRecord ? 3 : 4;
            bank.tensor[1][plane_entry(bank, piece, group, column) * bytes + 2] = zero;
        }
    }
};

void zeros(const Descriptor& piece, const uint8_t* source, const Layer& layer,
           Findings& findings) {
    ZeroPoints to{layer.bank[piece.bank], piece, {}};
    for (int64_t r = 0; r < piece.rows; ++r) {
        const uint8_t* row = source + r * piece.row_bytes + piece.skip;
        if (piece.role == kZerosGn) {
            for (int64_t w = 0; w < piece.cols / 8; ++w) {
                const uint32_t word = read<uint32_t>(row + w * 4);
                for (int m = 0; m < 8; ++m)
                    to.put(piece.dest_row + r, 8 * w + m, word >> (4 * kAwqNibble[m]) & 0xf);
            }
        } else {
            for (int64_t g = 0; g < piece.cols; ++g) {
                const uint32_t word = read<uint32_t>(row + g * 4);
                for (int m = 0; m < 8; ++m)
                    to.put(g, piece.dest_row + 8 * r + m, word >> (4 * m) & 0xf);
            }
        }
    }
    to.unexpected.report(findings, kZeroPoint);
}

void global(const Descriptor& piece, const uint8_t* source, const Layer& layer,
            Findings& findings) {
    const Bank& bank = layer.bank[piece.bank];
    const float value = piece.role == kGlobalBf16 ? from_bf16(read<uint16_t>(source + piece.skip))
                                                  : read<float>(source + piece.skip);
    const bool good = usable_global(bank, value);
    if (bank.layout == kCompact) {
        const int64_t parity = bank.projections == 2 ? piece.projection : 0;
        memcpy(bank.tensor[2] + (piece.slot * bank.projections + parity) * 4, &value, 4);
    } else {
        layer.cache[piece.slot * 3 + piece.projection] = value;
    }
    findings.add(kGlobal, !good, 0, 0, static_cast<int32_t>(to_bits(value)));
}

void check_shape(const Descriptor& piece, const uint8_t* source, Findings& findings) {
    const int64_t expected[2] = {piece.expect_a, piece.expect_b};
    Bad bad;
    for (int i = 0; i < 2; ++i) {
        const int64_t value = read<int64_t>(source + piece.skip + 8 * i);
        if (value != expected[i]) bad.hit(0, i, value);
    }
    bad.report(findings, kShape);
}

void check_groups(const Descriptor& piece, const uint8_t* source, Findings& findings) {
    bool unset = true;
    Bad bad;
    for (int64_t i = 0; i < piece.cols; ++i) {
        const int32_t value = read<int32_t>(source + piece.skip + 4 * i);
        unset = unset && value == -1;
        if (value != i / piece.expect_a) bad.hit(0, i, value);
    }
    if (!unset) bad.report(findings, kGroups);
}

void plain(const Descriptor& piece, const uint8_t* source, const Layer& layer) {
    const Bank& bank = layer.bank[piece.bank];
    const int64_t parity = bank.projections == 2 ? piece.projection : 0;
    for (int64_t r = 0; r < piece.rows; ++r) {
        const int64_t n = (piece.dest_row + r) * bank.projections + parity;
        memcpy(bank.tensor[0] + (piece.slot * bank.n + n) * bank.k * 2,
               source + r * piece.row_bytes + piece.skip, static_cast<size_t>(piece.cols) * 2);
    }
}

}  // namespace

void write_metadata(const Descriptor& piece, const uint8_t* source, const Layer& layer,
                    Findings& findings) {
    switch (piece.role) {
        case kScalesGn:
            if (layer.bank[piece.bank].layout == kCompact && !layer.checks_fp16())
                return scales_compact(piece, source, layer, findings);
            return scales(piece, source, layer, false, findings);
        case kScalesNg: return scales(piece, source, layer, true, findings);
        case kScalesNg8: return block_scales(piece, source, layer, findings);
        case kScalesGn32: return fp32_scales(piece, source, layer, false, findings);
        case kScalesNg32: return fp32_scales(piece, source, layer, true, findings);
        case kZerosGn:
        case kZerosNg: return zeros(piece, source, layer, findings);
        case kGlobalF32:
        case kGlobalBf16: return global(piece, source, layer, findings);
        case kCheckShape: return check_shape(piece, source, findings);
        case kCheckGroups: return check_groups(piece, source, findings);
        case kPlainNk: return plain(piece, source, layer);
        default: return;  // codes are the business of codes.h
    }
}

}  // namespace qpn
