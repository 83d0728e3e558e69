// Weight words to operand fragments: eight codes of one column become four pairs of 16-bit numbers
// (rows 0-1, 2-3, 4-5, 6-7), times a constant that is taken out of the sums at the end.
#pragma once
#include "numbers.cuh"
#include "qpn.cuh"

namespace qpn {

// int4, fp16: codes as the subnormal numbers q 2^-24, exact on tensor cores; no exponent is set and
// none has to be subtracted again. Pairs 1 and 3 are 16 times that: their activations are divided
// by 16 instead, which costs once what a shift would cost for every word.
template <class Act, int kKind>
struct Codes {
    static constexpr bool kZeros = true;    // sums of the activations are needed
    static constexpr float kOffset = 0.0f;  // fragment = q + offset, times the constant
    static constexpr float kBack = 16777216.0f;
    static constexpr uint32_t kOneEven = 0x00010001u, kOneOdd = 0x00100010u;
    static constexpr bool kDividesOdd = true;
    static QPN_DEVICE void pairs(uint32_t w, uint32_t (&p)[4]) {
        const uint32_t high = w >> 8;
        p[0] = w & 0x000f000fu;
        p[1] = w & 0x00f000f0u;
        p[2] = high & 0x000f000fu;
        p[3] = high & 0x00f000f0u;
    }
    static QPN_DEVICE uint32_t odd_activations(uint32_t x) { return half2_mul(x, 0x2c002c00u); }
};

// int4, bf16: 128 + q; subnormal products would leave the range of fp32.
template <>
struct Codes<Bf16, kInt4> {
    static constexpr bool kZeros = true;
    static constexpr float kOffset = 128.0f;
    static constexpr float kBack = 1.0f;
    static constexpr uint32_t kOneEven = 0x3f803f80u, kOneOdd = 0x3f803f80u;
    static constexpr bool kDividesOdd = false;
    static QPN_DEVICE void pairs(uint32_t w, uint32_t (&p)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = ((w >> (4 * i)) & 0x000f000fu) | 0x43004300u;
    }
    static QPN_DEVICE uint32_t odd_activations(uint32_t x) { return x; }
};

// e2m1, fp16: exponent and mantissa at bits 9 to 11 are the number times 2^-14, subnormals too.
template <>
struct Codes<Half, kE2m1> {
    static constexpr bool kZeros = false;
    static constexpr float kOffset = 0.0f;
    static constexpr float kBack = 16384.0f;
    static constexpr uint32_t kOneEven = 0, kOneOdd = 0;
    static constexpr bool kDividesOdd = false;
    static QPN_DEVICE void pairs(uint32_t w, uint32_t (&p)[4]) {
        p[0] = ((w << 9) & 0x0e000e00u) | ((w << 12) & 0x80008000u);
        p[1] = ((w << 5) & 0x0e000e00u) | ((w << 8) & 0x80008000u);
        p[2] = ((w << 1) & 0x0e000e00u) | ((w << 4) & 0x80008000u);
        p[3] = ((w >> 3) & 0x0e000e00u) | (w & 0x80008000u);
    }
    static QPN_DEVICE uint32_t odd_activations(uint32_t x) { return x; }
};

// e2m1, bf16: the same at bits 6 to 8 is the number times 2^-126; multiplied up at once.
template <>
struct Codes<Bf16, kE2m1> {
    static constexpr bool kZeros = false;
    static constexpr float kOffset = 0.0f;
    static constexpr float kBack = 1.0f;
    static constexpr uint32_t kOneEven = 0, kOneOdd = 0;
    static constexpr bool kDividesOdd = false;
    static QPN_DEVICE void pairs(uint32_t w, uint32_t (&p)[4]) {
        p[0] = ((w << 6) & 0x01c001c0u) | ((w << 12) & 0x80008000u);
        p[1] = ((w << 2) & 0x01c001c0u) | ((w << 8) & 0x80008000u);
        p[2] = ((w >> 2) & 0x01c001c0u) | ((w << 4) & 0x80008000u);
        p[3] = ((w >> 6) & 0x01c001c0u) | (w & 0x80008000u);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = bf162_fma(p[i], 0x7e807e80u, 0x80008000u);
    }
    static QPN_DEVICE uint32_t odd_activations(uint32_t x) { return x; }
};

// `fused_bias`: codes as whole fp16 numbers, then one fp16 fma with scale and bias.
QPN_DEVICE void fused_pairs(uint32_t w, uint32_t scale2, uint32_t bias2, uint32_t (&p)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t code = half2_sub(((w >> (4 * i)) & 0x000f000fu) | 0x64006400u, 0x64006400u);
        p[i] = half2_fma(code, scale2, bias2);
    }
}

// A pair of fp16 weights as bf16: the nearest pair, and what it leaves, which bf16 holds too.
QPN_DEVICE void split_half2(uint32_t pair, uint32_t& nearest, uint32_t& rest) {
    const float low = half_to_float(pair), high = half_to_float(pair >> 16);
    const uint32_t a = float_to_bf16(low), b = float_to_bf16(high);
    nearest = a | b << 16;
    rest = float_to_bf16(low - bf16_to_float(a)) | float_to_bf16(high - bf16_to_float(b)) << 16;
}

}  // namespace qpn
