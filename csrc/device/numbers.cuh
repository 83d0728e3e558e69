// 16-bit and 8-bit numbers as bits, by PTX: no header of the toolkit is needed.
#pragma once
#include "macros.cuh"

namespace qpn {

QPN_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }

// Four of the eight bytes of `low` and `high`, by the four low nibbles of `select`.
QPN_DEVICE uint32_t prmt(uint32_t low, uint32_t high, uint32_t select) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(select));
    return bytes;
}

// Of the low half of a word.
QPN_DEVICE float half_to_float(uint32_t low) {
    float value;
    asm("{.reg .b16 h, g; mov.b32 {h, g}, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(low));
    return value;
}

QPN_DEVICE uint32_t float_to_half(float value) {
    uint32_t bits;
    asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(bits) : "f"(value));
    return bits;
}

QPN_DEVICE float bf16_to_float(uint32_t low) { return bits_to_float(low << 16); }

// To nearest, ties to even; NaN stays NaN.
QPN_DEVICE uint32_t float_to_bf16(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Four e4m3 bytes as two pairs of fp16, exactly: sign, 4 bits of exponent with bias 7, 3 of
// mantissa; 0x7f and 0xff are NaN. Without the instruction: the low seven bits are those of an fp16
// 2^8 too small.
QPN_DEVICE void e4m3_to_half2(uint32_t bytes, uint32_t& low, uint32_t& high) {
#if QPN_ARCH >= 890
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, "
        "b;}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
#else
    uint32_t pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t two = (bytes >> (16 * i) & 0xffu) | (bytes >> (16 * i + 8) & 0xffu) << 16;
        asm("mul.rn.f16x2 %0, %1, %2;"
            : "=r"(pair[i])
            : "r"((two & 0x00800080u) << 8 | (two & 0x007f007fu) << 7), "r"(0x5c005c00u));
        if ((two & 0x7fu) == 0x7fu) pair[i] |= 0x7fffu;
        if ((two & 0x7f0000u) == 0x7f0000u) pair[i] |= 0x7fff0000u;
    }
    low = pair[0], high = pair[1];
#endif
}

QPN_DEVICE uint32_t half2_mul(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

QPN_DEVICE uint32_t half2_sub(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

QPN_DEVICE uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

QPN_DEVICE uint32_t bf162_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = 0;
#if QPN_ARCH >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
    return d;
}

// The activation dtypes. `from_half2`: a pair of fp16 numbers with at most eight significant bits.
struct Half {
    static constexpr bool kBf16 = false;
    static QPN_DEVICE float to_float(uint32_t bits) { return half_to_float(bits); }
    static QPN_DEVICE uint32_t from_float(float value) { return float_to_half(value); }
    static QPN_DEVICE uint32_t from_half2(uint32_t pair) { return pair; }
    static QPN_DEVICE uint32_t product(uint32_t a, uint32_t b) { return half2_mul(a, b); }
};
struct Bf16 {
    static constexpr bool kBf16 = true;
    static QPN_DEVICE float to_float(uint32_t bits) { return bf16_to_float(bits); }
    static QPN_DEVICE uint32_t from_float(float value) { return float_to_bf16(value); }
    static QPN_DEVICE uint32_t from_half2(uint32_t pair) {
        return prmt(__float_as_uint(half_to_float(pair)),
                    __float_as_uint(half_to_float(pair >> 16)), 0x7632u);
    }
    static QPN_DEVICE uint32_t product(uint32_t a, uint32_t b) {
        return bf162_fma(a, b, 0x80008000u);
    }
};

template <class Act>
QPN_DEVICE float rounded(float value) {
    return Act::to_float(Act::from_float(value));
}

}  // namespace qpn
