// 16-bit and 8-bit floats in plain integers: the same bits on every machine.
#pragma once
#include "macros.cuh"

namespace qpn {

QPN_BOTH float from_bits(uint32_t bits) {
    const union {
        uint32_t bits;
        float value;
    } both = {bits};
    return both.value;
}

QPN_BOTH uint32_t to_bits(float value) {
    union {
        float value;
        uint32_t bits;
    } both = {value};
    return both.bits;
}

QPN_BOTH float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest >= 0x0400u) return from_bits(sign | ((rest << 13) + 0x38000000u));
    const float tiny = static_cast<float>(rest) * 5.9604644775390625e-08f;  // 2^-24
    return from_bits(sign | to_bits(tiny));
}

// Rounds to nearest, ties to even, as every fp16 conversion instruction does.
QPN_BOTH uint16_t to_half(float value) {
    const uint32_t bits = to_bits(value);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (rest >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (rest < 0x38800000u) {  // subnormal in fp16: let fp32 addition round at the right bit
        const float shifted = from_bits(rest) + from_bits(0x3f000000u);
        return static_cast<uint16_t>(sign | (to_bits(shifted) - 0x3f000000u));
    }
    const uint32_t odd = rest >> 13 & 1u;
    return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + odd) >> 13));
}

QPN_BOTH float from_bf16(uint16_t word) { return from_bits(static_cast<uint32_t>(word) << 16); }

QPN_BOTH uint16_t to_bf16(float value) {
    const uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

QPN_BOTH float from_e4m3(uint8_t byte) {
    const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24;
    const uint32_t rest = byte & 0x7fu;
    if (rest == 0x7fu) return from_bits(sign | 0x7fc00000u);
    if (rest >= 8u) return from_bits(sign | ((rest << 20) + 0x3c000000u));
    return from_bits(sign | to_bits(static_cast<float>(rest) * 0.001953125f));  // 2^-9
}

QPN_BOTH bool finite(float value) { return (to_bits(value) & 0x7f800000u) != 0x7f800000u; }

// What `wide` and `record` hold (docs/bank.md): 0, or finite in fp16 with |x| >= 2^-14.
QPN_BOTH bool held_by_half(float value) {
    const float size = value < 0 ? -value : value;
    return value == 0 || (size >= 6.103515625e-05f && (to_half(value) & 0x7c00u) != 0x7c00u);
}

}  // namespace qpn
