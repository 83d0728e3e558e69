// Metadata of four neighbouring columns in one group: fetched as stored, decoded where it is used.
#pragma once
#include "access.cuh"
#include "numbers.cuh"
#include "qpn.cuh"

namespace qpn {

// Raw words of four columns under each layout.
template <int kKind, int kLayout>
struct Raw {
    static constexpr int kWords =
        kKind == kE2m1 ? (kLayout == kWide ? 2 : 1) : (kLayout == kWide ? 4 : 3);
    uint32_t r[kWords];
};

// Bytes of a lane's metadata in shared memory.
template <int kKind, int kLayout>
constexpr int kRawBytes = Raw<kKind, kLayout>::kWords * 4;

// Copies the metadata of one group and four columns to a place in shared memory; `at` is the first
// of 32 such places, `entry` counts from the expert's first. Zero points of four columns are two
// bytes: a copy takes the four around them. Zeros where `valid` is false: a scale of 0 takes part
// in nothing.
template <int kKind, int kLayout>
QPN_DEVICE void copy_raw(uint32_t at, int place, const uint8_t* plane, const uint8_t* second,
                         uint32_t entry, bool valid) {
    if constexpr (kKind == kE2m1 && kLayout == kWide) {
        copy_or_zero<8>(at + place * 8, plane + uint64_t(entry) * 2, valid);
    } else if constexpr (kKind == kE2m1) {
        copy_or_zero<4>(at + place * 4, plane + entry, valid);
    } else if constexpr (kLayout == kWide) {
        copy_or_zero<16>(at + place * 16, plane + uint64_t(entry) * 4, valid);
    } else if constexpr (kLayout == kRecord) {
#pragma unroll
        for (int i = 0; i < 3; ++i)
            copy_or_zero<4>(at + i * 128 + place * 4, plane + uint64_t(entry) * 3 + i * 4, valid);
    } else {
        copy_or_zero<8>(at + place * 8, plane + uint64_t(entry) * 2, valid);
        copy_or_zero<4>(at + 256 + place * 4, second + (entry / 2 & ~3u), valid);
    }
}

// Reads the place `from`, whose columns are 4g..4g+3 with g = from % 8.
template <int kKind, int kLayout>
QPN_DEVICE void read_raw(Raw<kKind, kLayout>& raw, uint32_t at, int from) {
    if constexpr (kKind == kE2m1 && kLayout == kWide) {
        read_pair(at + from * 8, raw.r[0], raw.r[1]);
    } else if constexpr (kKind == kE2m1) {
        raw.r[0] = read_word(at + from * 4);
    } else if constexpr (kLayout == kWide) {
        const Vector v = read_vector(at + from * 16);
        raw.r[0] = v.x, raw.r[1] = v.y, raw.r[2] = v.z, raw.r[3] = v.w;
    } else if constexpr (kLayout == kRecord) {
#pragma unroll
        for (int i = 0; i < 3; ++i) raw.r[i] = read_word(at + i * 128 + from * 4);
    } else {
        read_pair(at + from * 8, raw.r[0], raw.r[1]);
        raw.r[2] = read_word(at + 256 + from * 4) >> (from % 2 * 16);
    }
}

// The low four bits; `float_one` is 2^23: an integer as its low bits is as much more.
template <class Number>
QPN_DEVICE Number four_bits(uint32_t bits, uint32_t float_one) {
    if constexpr (Number(0.5f) == Number(0)) return Number(bits & 0xfu);
    return bits_to_float((bits & 0xfu) | float_one) - 8388608.0f;
}

// Scales as fp32, zero points as fp32 or integers, `float_one` being the bits of 2^23; e2m1 has no
// zero points.
template <int kKind, int kLayout, class Zero>
QPN_DEVICE void decode(const Raw<kKind, kLayout>& raw, const Bank& bank, uint32_t float_one,
                       float (&scale)[4], Zero (&zero)[4]) {
    const uint32_t (&r)[Raw<kKind, kLayout>::kWords] = raw.r;
    if constexpr (kKind == kE2m1) {
        uint32_t pair[2];
        if constexpr (kLayout == kWide)
            pair[0] = r[0], pair[1] = r[1];
        else
            e4m3_to_half2(r[0], pair[0], pair[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scale[i] = half_to_float(pair[i / 2] >> (16 * (i % 2)));
            zero[i] = Zero(0);
        }
    } else if constexpr (kLayout == kWide) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scale[i] = half_to_float(r[i] & 0xffffu);
            // A zero scale has lost its zero point, and needs none.
            zero[i] = Zero(
                scale[i] == 0.0f ? 0.0f : rintf(__fdividef(-half_to_float(r[i] >> 16), scale[i])));
        }
    } else if constexpr (kLayout == kRecord) {
        const uint32_t half[4] = {r[0] & 0xffffu, (r[0] >> 24) | ((r[1] & 0xffu) << 8), r[1] >> 16,
                                  (r[2] >> 8) & 0xffffu};
        const uint32_t z[4] = {(r[0] >> 16) & 0xffu, (r[1] >> 8) & 0xffu, r[2] & 0xffu, r[2] >> 24};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scale[i] = half_to_float(half[i]);
            zero[i] = Zero(z[i]);
        }
    } else {
        const bool bf16 = bank.scale_dtype == kBf16;
        if (bf16) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                scale[i] = bits_to_float(i % 2 ? r[i / 2] & 0xffff0000u : r[i / 2] << 16);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) scale[i] = half_to_float(r[i / 2] >> (16 * (i % 2)));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) zero[i] = four_bits<Zero>(r[2] >> (4 * i), float_one);
    }
}

// fp16 scale and bias of four columns for `fused_bias`, each doubled into both halves.
template <int kLayout>
QPN_DEVICE void decode_fused(const Raw<kInt4, kLayout>& raw, const Bank& bank,
                             uint32_t (&scale2)[4], uint32_t (&bias2)[4]) {
    float scale[4], zero[4];
    if constexpr (kLayout != kWide) decode<kInt4, kLayout>(raw, bank, 0x4b000000u, scale, zero);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t s, b;
        if constexpr (kLayout == kWide) {
            s = raw.r[i] & 0xffffu;
            b = raw.r[i] >> 16;
        } else {
            s = float_to_half(scale[i]);
            b = float_to_half((0.0f - zero[i]) * scale[i]);
        }
        scale2[i] = s | (s << 16);
        bias2[i] = b | (b << 16);
    }
}

// The fp32 global of a column, as a factor or as a divisor of its sum; 1 where there is none.
QPN_DEVICE float apply_global(const Bank& bank, int64_t slot, int32_t column, float sum) {
    if (bank.sense == kNoGlobal || bank.layout == kWide) return sum;
    const float* globals = reinterpret_cast<const float*>(bank.second);
    const float whole = globals[slot * bank.projections + (bank.projections == 2 ? column & 1 : 0)];
    return bank.sense == kDivisor ? sum / whole : sum * whole;
}

}  // namespace qpn
