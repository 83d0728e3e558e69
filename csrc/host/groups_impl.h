// Metadata of one group of a tile: the scales as fp32, the zero points as integers.
#pragma once
#include "lanes_impl.h"

namespace qpn {
namespace {

struct Group {
    alignas(64) float scale[kTile];
    alignas(64) int32_t zero[kTile];
};

inline void from_halves(const uint16_t* halves, float* out) {
#ifdef __F16C__
    for (int c = 0; c < kTile; c += 8)
        _mm256_storeu_ps(out + c, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(halves + c))));
#else
    for (int c = 0; c < kTile; ++c) out[c] = from_half(halves[c]);
#endif
}

// Two to a byte, the even column low.
inline void from_nibbles(const uint8_t* bytes, int32_t* out) {
#ifdef __AVX2__
    const __m128i both = _mm_loadu_si128((const __m128i*)bytes), mask = _mm_set1_epi8(0xf);
    const __m128i even = _mm_and_si128(both, mask), odd = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    const __m128i half[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
    for (int h = 0; h < 2; ++h) {
        _mm256_store_si256((__m256i*)(out + 16 * h), _mm256_cvtepu8_epi32(half[h]));
        _mm256_store_si256((__m256i*)(out + 16 * h + 8), _mm256_cvtepu8_epi32(_mm_srli_si128(half[h], 8)));
    }
#else
    for (int c = 0; c < kTile; ++c) out[c] = bytes[c / 2] >> (c % 2 * 4) & 0xf;
#endif
}

inline void read_compact(const Bank& bank, int64_t entry, Group& out) {
    uint16_t halves[kTile];
    memcpy(halves, bank.tensor[1] + entry * 2, sizeof halves);
    if (bank.scale_dtype == kBf16)
        for (int c = 0; c < kTile; ++c) out.scale[c] = from_bf16(halves[c]);
    else
        from_halves(halves, out.scale);
    from_nibbles(bank.tensor[2] + entry / 2, out.zero);
}

inline void read_record(const Bank& bank, int64_t entry, Group& out) {
    const uint8_t* records = bank.tensor[1] + entry * 3;
    uint16_t halves[kTile];
    for (int c = 0; c < kTile; ++c) {
        halves[c] = static_cast<uint16_t>(records[3 * c] | records[3 * c + 1] << 8);
        out.zero[c] = records[3 * c + 2];
    }
    from_halves(halves, out.scale);
}

inline void read_wide(const Bank& bank, int64_t entry, Group& out) {
    uint32_t words[kTile];
    uint16_t halves[kTile];
    float bias[kTile];
    memcpy(words, bank.tensor[1] + entry * 4, sizeof words);
    for (int c = 0; c < kTile; ++c) halves[c] = static_cast<uint16_t>(words[c]);
    from_halves(halves, out.scale);
    for (int c = 0; c < kTile; ++c) halves[c] = static_cast<uint16_t>(words[c] >> 16);
    from_halves(halves, bias);
    for (int c = 0; c < kTile; ++c) {
        // A zero scale has no zero point to recover; its weights are 0 whatever it was.
        const float divisor = out.scale[c] == 0 ? 1.0f : out.scale[c];
        bias[c] = out.scale[c] == 0 ? 0.0f : rintf(-bias[c] / divisor);
    }
    for (int c = 0; c < kTile; ++c) out.zero[c] = static_cast<int32_t>(bias[c]);
}

// An e4m3 byte moved into the fields of an fp16 is 2^-8 of its value, subnormals too; only its NaN
// has no such place.
inline void read_e4m3(const uint8_t* bytes, float* out) {
    uint16_t halves[kTile];
    for (int c = 0; c < kTile; ++c) {
        const uint16_t byte = bytes[c], rest = byte & 0x7f;
        const uint16_t nan = rest == 0x7f ? 0x7e00 : 0;
        halves[c] = static_cast<uint16_t>((byte & 0x80) << 8 | rest << 7 | nan);
    }
    from_halves(halves, out);
    for (int c = 0; c < kTile; ++c) out[c] *= 256.0f;
}

inline void read_group(const Bank& bank, int64_t entry, Group& out) {
    if (bank.kind == kE2m1 && bank.layout == kCompact) return read_e4m3(bank.tensor[1] + entry, out.scale);
    if (bank.kind == kE2m1) {
        uint16_t halves[kTile];
        memcpy(halves, bank.tensor[1] + entry * 2, sizeof halves);
        return from_halves(halves, out.scale);
    }
    if (bank.layout == kCompact) return read_compact(bank, entry, out);
    if (bank.layout == kRecord) return read_record(bank, entry, out);
    read_wide(bank, entry, out);
}

// The global of one column of an e2m1 `compact` bank, applied to a sum or to a scale.
inline float with_global(const Bank& bank, int64_t slot, int column, float value) {
    float global;
    const int64_t at = slot * bank.projections + (bank.projections == 2 ? column % 2 : 0);
    memcpy(&global, bank.tensor[2] + at * 4, sizeof global);
    return bank.sense == kDivisor ? value / global : value * global;
}

}  // namespace
}  // namespace qpn
