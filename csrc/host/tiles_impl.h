// Included by tiles_*.cpp with QPN_TILES set to the name of its table.
#include <math.h>
#include <string.h>

#include "numbers.h"
#include "tiles.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace qpn {
namespace {

typedef uint32_t Words __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));
constexpr int kVectors = 4;  // vectors of eight columns in a tile

inline Words load_words(const uint32_t* at) {
    Words v;
    memcpy(&v, at, sizeof v);
    return v;
}

inline Floats load_floats(const float* at) {
    Floats v;
    memcpy(&v, at, sizeof v);
    return v;
}

inline void store_floats(float* at, Floats v) { memcpy(at, &v, sizeof v); }

inline Floats all(float value) {
    return Floats{value, value, value, value, value, value, value, value};
}

inline Floats fma(Floats a, Floats b, Floats c) {
#ifdef __FMA__
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Eight rows of one word vector as fp32 codes, in row order: integers 0..15.
struct Int4 {
    Words word;
    explicit Int4(Words w) : word(w) {}
    template <int kRow>
    Floats row() const {
        constexpr int shift = 4 * kNibbleOfRow[kRow];
        return to_floats((Ints)((word >> shift) & 0xfu));
    }
};

// The same for e2m1 codes: twice the value is a small signed integer, found byte by byte.
struct E2m1 {
    Words low, high;  // bytes: doubled values of nibbles 0, 2, 4, 6 and 1, 3, 5, 7
    explicit E2m1(Words w) : low(doubled(w & 0x0f0f0f0fu)), high(doubled((w >> 4) & 0x0f0f0f0fu)) {}

    static Words doubled(Words nibbles) {
#ifdef __AVX2__
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        return (Words)_mm256_shuffle_epi8(table, (__m256i)nibbles);
#else
        static const int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        uint8_t bytes[32];
        memcpy(bytes, &nibbles, sizeof bytes);
        for (int i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(table[bytes[i]]);
        memcpy(&nibbles, bytes, sizeof bytes);
        return nibbles;
#endif
    }

    template <int kRow>
    Floats row() const {
        constexpr int nibble = kNibbleOfRow[kRow];
        const Words bytes = nibble % 2 ? high : low;
        return to_floats((Ints)(bytes << (24 - 8 * (nibble / 2))) >> 24);
    }
};

inline float half_at(const uint8_t* at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return from_half(bits);
}

inline void halves_to_floats(const uint8_t* at, float out[kTile]) {
#ifdef __F16C__
    for (int v = 0; v < kVectors; ++v)
        _mm256_storeu_ps(out + 8 * v, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 16 * v))));
#else
    for (int c = 0; c < kTile; ++c) out[c] = half_at(at + 2 * c);
#endif
}

inline void bf16_to_floats(const uint8_t* at, float out[kTile]) {
    uint16_t words[kTile];
    uint32_t bits[kTile];
    memcpy(words, at, sizeof words);
    for (int c = 0; c < kTile; ++c) bits[c] = static_cast<uint32_t>(words[c]) << 16;
    memcpy(out, bits, sizeof bits);
}

// Scales and zero points of one group of a tile, as fp32.
struct Group {
    alignas(32) float scale[kTile];
    alignas(32) float zero[kTile];
};

void read_int4(const Bank& bank, int64_t entry, Group& out) {
    if (bank.layout == kCompact) {
        const uint8_t* scales = bank.tensor[1] + entry * 2;
        if (bank.scale_dtype == kBf16)
            bf16_to_floats(scales, out.scale);
        else
            halves_to_floats(scales, out.scale);
        const uint8_t* zeros = bank.tensor[2] + entry / 2;
        for (int c = 0; c < kTile / 2; ++c) {
            out.zero[2 * c] = static_cast<float>(zeros[c] & 0xf);
            out.zero[2 * c + 1] = static_cast<float>(zeros[c] >> 4);
        }
    } else if (bank.layout == kRecord) {
        const uint8_t* records = bank.tensor[1] + entry * 3;
        for (int c = 0; c < kTile; ++c) {
            out.scale[c] = half_at(records + 3 * c);
            out.zero[c] = static_cast<float>(records[3 * c + 2]);
        }
    } else {
        const uint8_t* words = bank.tensor[1] + entry * 4;
        for (int c = 0; c < kTile; ++c) {
            out.scale[c] = half_at(words + 4 * c);
            const float bias = half_at(words + 4 * c + 2);
            // A zero scale has no zero point to recover; its weights are 0 whatever it was.
            out.zero[c] = out.scale[c] == 0 ? 0.0f : rintf(-bias / out.scale[c]);
        }
    }
}

void read_e2m1(const Bank& bank, int64_t entry, Group& out) {
    if (bank.layout == kWide) {
        halves_to_floats(bank.tensor[1] + entry * 2, out.scale);
        return;
    }
    const uint8_t* bytes = bank.tensor[1] + entry;
    // Small numbers by multiplication: bit tricks on subnormals would fail where they are flushed.
    for (int c = 0; c < kTile; ++c) {
        const uint32_t byte = bytes[c], rest = byte & 0x7fu;
        const float small = static_cast<float>(static_cast<int32_t>(rest)) * 0.001953125f;  // 2^-9
        const uint32_t large = rest == 0x7fu ? 0x7fc00000u : (rest << 20) + 0x3c000000u;
        out.scale[c] = from_bits((rest < 8u ? to_bits(small) : large) | (byte & 0x80u) << 24);
    }
}

// First and last k8 of a group; the last group takes the pad rows.
inline void span(const Bank& bank, int64_t group, int64_t& first, int64_t& last) {
    first = group == 0 ? 0 : (group * bank.group - bank.phase) / kRowsPerWord;
    last = group + 1 == bank.groups() ? bank.k8()
                                      : ((group + 1) * bank.group - bank.phase) / kRowsPerWord;
}

inline const uint32_t* tile_of(const Bank& bank, int64_t slot, int64_t tile) {
    return reinterpret_cast<const uint32_t*>(bank.tensor[0]) + slot * bank.expert_words() +
           tile * bank.tile_words();
}

template <class Codes, int kRow>
inline void add_row(const Codes& codes, const float* x, Floats& sum) {
    sum = fma(codes.template row<kRow>(), all(x[kRow]), sum);
}

template <class Codes>
inline void add_word(Words word, const float* x, Floats& sum) {
    const Codes codes(word);
    add_row<Codes, 0>(codes, x, sum);
    add_row<Codes, 1>(codes, x, sum);
    add_row<Codes, 2>(codes, x, sum);
    add_row<Codes, 3>(codes, x, sum);
    add_row<Codes, 4>(codes, x, sum);
    add_row<Codes, 5>(codes, x, sum);
    add_row<Codes, 6>(codes, x, sum);
    add_row<Codes, 7>(codes, x, sum);
}

// One row of activations: scales multiply the group sums, so a code costs one multiply-add.
template <class Codes, bool kZeros>
void one_row(const TileCall& call, void (*read)(const Bank&, int64_t, Group&)) {
    const Bank& bank = *call.bank;
    const uint32_t* words = tile_of(bank, call.slot, call.tile);
    const int64_t entry0 = call.slot * bank.plane() + call.tile * kTile;
    Floats total[kVectors] = {};
    for (int64_t g = 0; g < bank.groups(); ++g) {
        Group group;
        read(bank, entry0 + g * bank.n_padded(), group);
        int64_t first, last;
        span(bank, g, first, last);
        Floats sum[kVectors] = {};
        for (int64_t k8 = first; k8 < last; ++k8) {
            const uint32_t* line = words + k8 * kTile;
            const float* x = call.x[0] + k8 * kRowsPerWord;
            for (int v = 0; v < kVectors; ++v) add_word<Codes>(load_words(line + 8 * v), x, sum[v]);
        }
        for (int v = 0; v < kVectors; ++v) {
            if (kZeros) sum[v] -= load_floats(group.zero + 8 * v) * all(call.sums[0][g]);
            total[v] = fma(sum[v], load_floats(group.scale + 8 * v), total[v]);
        }
    }
    for (int v = 0; v < kVectors; ++v) store_floats(call.y[0] + 8 * v, total[v]);
}

// Several rows: a code is scaled once and multiplied with every row.
struct Exact {
    Floats scale, shift;
    Exact(const float* s, const float* z, bool zeros)
        : scale(load_floats(s)), shift(zeros ? -load_floats(z) * load_floats(s) : all(0.0f)) {}
    Floats operator()(Floats code) const { return fma(code, scale, shift); }
};

// fp16_fma(q, s, fp16(-z * s)): the fp32 sum is exact, so it rounds once.
struct FusedBias {
    Floats scale, bias;
    static Floats round(Floats v) {
#ifdef __F16C__
        return (Floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
        for (int i = 0; i < 8; ++i) v[i] = from_half(to_half(v[i]));
        return v;
#endif
    }
    FusedBias(const float* s, const float* z, bool)
        : scale(load_floats(s)), bias(round((all(0.0f) - load_floats(z)) * load_floats(s))) {}
    Floats operator()(Floats code) const { return round(fma(code, scale, bias)); }
};

template <class Codes, class Scaled, int kRows, int kRow>
inline void spread_row(const Codes& codes, const Scaled& scaled, const TileCall& call, int64_t k,
                       Floats sum[kRows]) {
    const Floats weight = scaled(codes.template row<kRow>());
    for (int r = 0; r < kRows; ++r) sum[r] = fma(weight, all(call.x[r][k + kRow]), sum[r]);
}

template <class Codes, class Scaled, int kRows, bool kZeros>
void some_rows(const TileCall& call, void (*read)(const Bank&, int64_t, Group&)) {
    const Bank& bank = *call.bank;
    const uint32_t* words = tile_of(bank, call.slot, call.tile);
    const int64_t entry0 = call.slot * bank.plane() + call.tile * kTile;
    for (int r = 0; r < kRows; ++r) memset(call.y[r], 0, kTile * sizeof(float));
    for (int64_t g = 0; g < bank.groups(); ++g) {
        Group group;
        read(bank, entry0 + g * bank.n_padded(), group);
        int64_t first, last;
        span(bank, g, first, last);
        for (int v = 0; v < kVectors; ++v) {
            const Scaled scaled(group.scale + 8 * v, group.zero + 8 * v, kZeros);
            Floats sum[kRows];
            for (int r = 0; r < kRows; ++r) sum[r] = load_floats(call.y[r] + 8 * v);
            for (int64_t k8 = first; k8 < last; ++k8) {
                const Codes codes(load_words(words + k8 * kTile + 8 * v));
                const int64_t k = k8 * kRowsPerWord;
                spread_row<Codes, Scaled, kRows, 0>(codes, scaled, call, k, sum);
                spread_row<Codes, Scaled, kRows, 1>(codes, scaled, call, k, sum);
                spread_row<Codes, Scaled, kRows, 2>(codes, scaled, call, k, sum);
                spread_row<Codes, Scaled, kRows, 3>(codes, scaled, call, k, sum);
                spread_row<Codes, Scaled, kRows, 4>(codes, scaled, call, k, sum);
                spread_row<Codes, Scaled, kRows, 5>(codes, scaled, call, k, sum);
                spread_row<Codes, Scaled, kRows, 6>(codes, scaled, call, k, sum);
                spread_row<Codes, Scaled, kRows, 7>(codes, scaled, call, k, sum);
            }
            for (int r = 0; r < kRows; ++r) store_floats(call.y[r] + 8 * v, sum[r]);
        }
    }
}

template <class Codes, class Scaled, bool kZeros>
void rows(const TileCall& call, void (*read)(const Bank&, int64_t, Group&)) {
    switch (call.rows) {
        case 1: return some_rows<Codes, Scaled, 1, kZeros>(call, read);
        case 2: return some_rows<Codes, Scaled, 2, kZeros>(call, read);
        case 3: return some_rows<Codes, Scaled, 3, kZeros>(call, read);
        case 4: return some_rows<Codes, Scaled, 4, kZeros>(call, read);
        case 5: return some_rows<Codes, Scaled, 5, kZeros>(call, read);
        case 6: return some_rows<Codes, Scaled, 6, kZeros>(call, read);
        case 7: return some_rows<Codes, Scaled, 7, kZeros>(call, read);
        default: return some_rows<Codes, Scaled, 8, kZeros>(call, read);
    }
}

// e2m1 codes come doubled, and the global applies to the fp32 sum: both at the end.
void close_e2m1(const TileCall& call) {
    const Bank& bank = *call.bank;
    for (int r = 0; r < call.rows; ++r)
        for (int c = 0; c < kTile; ++c) {
            float value = call.y[r][c] * 0.5f;
            if (bank.layout == kCompact) {
                float global;
                const int64_t at = call.slot * bank.projections + (bank.projections == 2 ? c % 2 : 0);
                memcpy(&global, bank.tensor[2] + at * 4, 4);
                value = bank.sense == kDivisor ? value / global : value * global;
            }
            call.y[r][c] = value;
        }
}

void run(const TileCall& call) {
    if (call.bank->kind == kE2m1) {
        if (call.rows == 1)
            one_row<E2m1, false>(call, read_e2m1);
        else
            rows<E2m1, Exact, false>(call, read_e2m1);
        close_e2m1(call);
    } else if (call.fused_bias) {
        rows<Int4, FusedBias, true>(call, read_int4);
    } else if (call.rows == 1) {
        one_row<Int4, true>(call, read_int4);
    } else {
        rows<Int4, Exact, true>(call, read_int4);
    }
}

// One weight, in the order of DESIGN section 5.
inline float weight(const Bank& bank, bool fused_bias, uint32_t code, float scale, float zero) {
    static const float e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    if (bank.kind == kE2m1) return e2m1[code] * scale;
    const float q = static_cast<float>(code);
    if (fused_bias) return from_half(to_half(q * scale + from_half(to_half((0.0f - zero) * scale))));
    return scale == 0 ? 0.0f : (q - zero) * scale;
}

void dequantize(const Bank& bank, int64_t slot, int64_t tile, bool fused_bias, float* out) {
    const uint32_t* words = tile_of(bank, slot, tile);
    const int64_t entry0 = slot * bank.plane() + tile * kTile;
    const int64_t columns = bank.n - tile * kTile < kTile ? bank.n - tile * kTile : kTile;
    for (int64_t g = 0; g < bank.groups(); ++g) {
        Group group;
        if (bank.kind == kE2m1)
            read_e2m1(bank, entry0 + g * bank.n_padded(), group);
        else
            read_int4(bank, entry0 + g * bank.n_padded(), group);
        int64_t first, last;
        span(bank, g, first, last);
        for (int64_t c = 0; c < columns; ++c) {
            float scale = group.scale[c];
            if (bank.kind == kE2m1 && bank.layout == kCompact) {
                float global;
                const int64_t at = slot * bank.projections + (bank.projections == 2 ? c % 2 : 0);
                memcpy(&global, bank.tensor[2] + at * 4, 4);
                scale = bank.sense == kDivisor ? scale / global : scale * global;
            }
            for (int64_t k8 = first; k8 < last; ++k8) {
                const uint32_t word = words[k8 * kTile + c];
                const int64_t k = k8 * kRowsPerWord;
                for (int j = 0; j < 8 && k + j < bank.k; ++j)
                    out[c * bank.k + k + j] = weight(bank, fused_bias, word >> (4 * kNibbleOfRow[j]) & 0xf,
                                                     scale, group.zero[c]);
            }
        }
    }
}

}  // namespace

extern const TileKernels QPN_TILES;
const TileKernels QPN_TILES = {run, dequantize};

}  // namespace qpn
