// Weights of a tile as fp32, in the order of docs/routes.md.
#pragma once
#include "groups_impl.h"

namespace qpn {
namespace {

// Eight codes of one word in row order; eight lanes fit every instruction set.
typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef float Floats8 __attribute__((vector_size(32)));

inline Words8 codes_of(uint32_t word) {
    const Words8 shifts = {4 * kNibbleOfRow[0], 4 * kNibbleOfRow[1], 4 * kNibbleOfRow[2], 4 * kNibbleOfRow[3],
                           4 * kNibbleOfRow[4], 4 * kNibbleOfRow[5], 4 * kNibbleOfRow[6], 4 * kNibbleOfRow[7]};
    return (Words8{} + word) >> shifts & 0xfu;
}

struct ExactColumn {
    float scale, zero;
    ExactColumn(const Group& group, int c) : scale(group.scale[c]), zero(static_cast<float>(group.zero[c])) {}
    Floats8 operator()(Words8 codes) const {
        if (scale == 0) return Floats8{};
        return (__builtin_convertvector((Ints8)codes, Floats8) - zero) * scale;
    }
};

struct FusedColumn {
    float scale, bias;
    FusedColumn(const Group& group, int c)
        : scale(group.scale[c]),
          bias(from_half(to_half((0.0f - static_cast<float>(group.zero[c])) * group.scale[c]))) {}
    Floats8 operator()(Words8 codes) const {
        // fp32 holds the product and the sum exactly, whether they are fused or not.
        Floats8 v = __builtin_convertvector((Ints8)codes, Floats8) * scale + bias;
#ifdef __F16C__
        return (Floats8)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
        for (int i = 0; i < 8; ++i) v[i] = from_half(to_half(v[i]));
        return v;
#endif
    }
};

struct E2m1Column {
    float scale;
    E2m1Column(const Group& group, int c) : scale(group.scale[c]) {}
    Floats8 operator()(Words8 codes) const {
        static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
        Floats8 v;
        for (int i = 0; i < 8; ++i) v[i] = values[codes[i]];
        return v * scale;
    }
};

template <class Column>
void write_group(const Bank& bank, const uint32_t* words, const Group& group, int64_t g, int64_t columns,
                 float* out) {
    int64_t first, last;
    span(bank, g, first, last);
    const int64_t whole = last < bank.k / kRowsPerWord ? last : bank.k / kRowsPerWord;
    for (int c = 0; c < columns; ++c) {
        const Column column(group, c);
        float* to = out + c * bank.k;
        for (int64_t k8 = first; k8 < whole; ++k8)
            store(to + k8 * kRowsPerWord, column(codes_of(words[k8 * kTile + c])));
        if (whole < last && whole * kRowsPerWord < bank.k) {
            const Floats8 rest = column(codes_of(words[whole * kTile + c]));
            memcpy(to + whole * kRowsPerWord, &rest, static_cast<size_t>(bank.k % kRowsPerWord) * 4);
        }
    }
}

void dequantize(const Bank& bank, int64_t slot, int64_t tile, bool fused_bias, float* out) {
    const uint32_t* words = tile_of(bank, slot, tile);
    const int64_t entry = slot * bank.plane() + tile * kTile;
    const int64_t columns = bank.n - tile * kTile < kTile ? bank.n - tile * kTile : kTile;
    for (int64_t g = 0; g < bank.groups(); ++g) {
        Group group;
        read_group(bank, entry + g * bank.n_padded(), group);
        if (bank.kind == kE2m1) {
            for (int c = 0; bank.layout == kCompact && c < columns; ++c)
                group.scale[c] = with_global(bank, slot, c, group.scale[c]);
            write_group<E2m1Column>(bank, words, group, g, columns, out);
        } else if (fused_bias) {
            write_group<FusedColumn>(bank, words, group, g, columns, out);
        } else {
            write_group<ExactColumn>(bank, words, group, g, columns, out);
        }
    }
}

}  // namespace
}  // namespace qpn
