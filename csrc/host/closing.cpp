#include "closing.h"

#include <string.h>

#include <vector>

#include "../device/floats.cuh"

namespace qpn {
namespace {

// Gate and up zero points lie side by side in the row that holds them interleaved from here on.
void interleave_zeros(const Bank& bank, int64_t slot) {
    const int64_t width = bank.n_padded() / 2, used = bank.columns();
    std::vector<uint8_t> packed(static_cast<size_t>(used));
    for (int64_t g = 0; g < bank.groups(); ++g) {
        uint8_t* row = bank.tensor[2] + (slot * bank.groups() + g) * width;
        memcpy(packed.data(), row, packed.size());
        const uint8_t *gate = packed.data(), *up = gate + used / 2;
        for (int64_t i = 0; i < used / 2; ++i) {
            row[2 * i] = static_cast<uint8_t>((gate[i] & 0x0f) | up[i] << 4);
            row[2 * i + 1] = static_cast<uint8_t>(gate[i] >> 4 | (up[i] & 0xf0));
        }
    }
}

// Scale (as fp16 bits) and zero point of one entry, before `wide` has its bias.
void entry_of(const Bank& bank, int64_t slot, int64_t group, int64_t n, uint16_t& scale,
              uint8_t& zero) {
    const int64_t entry = slot * bank.plane() + group * bank.n_padded() + n;
    if (bank.layout == kCompact) {
        memcpy(&scale, bank.tensor[1] + entry * 2, 2);
        if (bank.scale_dtype == kBf16) scale = to_half(from_bf16(scale));
        zero = bank.tensor[2][entry / 2] >> (entry % 2 * 4) & 0xf;
    } else {
        const uint8_t* at = bank.tensor[1] + entry * (bank.layout == kRecord ? 3 : 4);
        memcpy(&scale, at, 2);
        zero = at[2];
    }
}

void biases(const Bank& bank, int64_t slot, Findings& findings) {
    Bad not_held;
    for (int64_t g = 0; g < bank.groups(); ++g)
        for (int64_t n = 0; n < bank.n; ++n) {
            uint16_t scale;
            uint8_t zero;
            entry_of(bank, slot, g, n, scale, zero);
            const float value = from_half(scale);
            // 4 bits times 11 bits is exact in fp32, rounded once
            const uint16_t bias = to_half(static_cast<float>(0 - zero) * value);
            if ((bias & 0x7c00u) == 0x7c00u && finite(value)) not_held.hit(g, n, (int16_t)scale);
            if (bank.layout == kWide) {
                const int64_t entry = slot * bank.plane() + g * bank.n_padded() + n;
                memcpy(bank.tensor[1] + entry * 4 + 2, &bias, 2);
            }
        }
    not_held.report(findings, kNotHeld);
}

void wide_block_scales(const Layer& layer, int number, int64_t slot, Findings& findings) {
    const Bank& bank = layer.bank[number];
    const float* whole = layer.cache + slot * 3 + (number == 0 ? 0 : 2);
    const bool usable[2] = {usable_global(bank, whole[0]),
                            usable_global(bank, whole[bank.projections - 1])};
    Bad not_held;
    for (int64_t g = 0; g < bank.groups(); ++g)
        for (int64_t n = 0; n < bank.n; ++n) {
            uint8_t* at = bank.tensor[1] + (slot * bank.plane() + g * bank.n_padded() + n) * 2;
            const float block = from_e4m3(at[0]);
            const int64_t part = bank.projections == 2 ? n % 2 : 0;
            const float value = bank.sense == kDivisor ? block / whole[part] : block * whole[part];
            // What `write` has reported of block scales and globals is not reported again.
            if (!held_by_half(value) && finite(block) && usable[part]) not_held.hit(g, n, static_cast<int32_t>(to_bits(value)));
            const uint16_t half = to_half(value);
            memcpy(at, &half, 2);
        }
    not_held.report(findings, kNotHeld);
}

}  // namespace

void finish_expert(const Layer& layer, int number, int64_t slot, Findings& findings) {
    const Bank& bank = layer.bank[number];
    if (bank.kind == kInt4) {
        if (bank.layout == kCompact && bank.projections == 2) interleave_zeros(bank, slot);
        if (layer.checks_fp16()) biases(bank, slot, findings);
    } else if (bank.kind == kE2m1 && bank.layout == kWide) {
        wide_block_scales(layer, number, slot, findings);
    }
}

}  // namespace qpn
