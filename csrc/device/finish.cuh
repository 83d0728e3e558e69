// The closing pass over a layer: metadata that needed two tensors, and what only it can judge.
#pragma once
#include "planes.cuh"

namespace qpn {
inline namespace conversion {

// Whether a bank needs a closing pass on a card at all.
QPN_BOTH bool closes(const Layer& layer, const Bank& bank) {
    return bank.kind == kInt4 ? layer.checks_fp16() : bank.kind == kE2m1 && bank.layout == kWide;
}

// The closing pass of one entry of an int4 plane: its bias, or the check that it has one.
QPN_BOTH void close_int4(const Bank& bank, int64_t number, int64_t slot, int64_t group, int64_t n,
                       Tally* tally) {
    const int64_t entry = slot * bank.plane() + group * bank.n_padded() + n;
    const int64_t bytes = bank.layout == kCompact ? 2 : bank.layout == kRecord ? 3 : 4;
    uint8_t* at = bank.tensor[1] + entry * bytes;
    uint16_t half = static_cast<uint16_t>(load16(at));
    if (bank.layout == kCompact && bank.scale_dtype == kBf16) half = to_half(from_bf16(half));
    const uint8_t zero =
        bank.layout == kCompact ? bank.tensor[2][entry / 2] >> (entry % 2 * 4) & 0xf : at[2];
    const float value = from_half(half);
    // 4 bits times 11 bits is exact in fp32, rounded once
    const uint16_t bias = to_half(static_cast<float>(0 - zero) * value);
    if ((bias & 0x7c00u) == 0x7c00u && finite(value))
        hit(tally, closing_spot_of(number, slot, bank.experts), 1, rank_of(group, n),
            static_cast<int16_t>(half));
    if (bank.layout == kWide) put_bytes(at + 2, bias, 2);
}

QPN_BOTH void close_e2m1(const Layer& layer, int64_t number, int64_t slot, int64_t group, int64_t n,
                         Tally* tally) {
    const Bank& bank = layer.bank[number];
    const float* whole = layer.cache + slot * 3 + (number == 0 ? 0 : 2);
    uint8_t* at = bank.tensor[1] + (slot * bank.plane() + group * bank.n_padded() + n) * 2;
    const float block = from_e4m3(at[0]);
    const float global = whole[bank.projections == 2 ? n % 2 : 0];
    const float value = bank.sense == kDivisor ? block / global : block * global;
    // What was found in block scales and globals before is not found again.
    if (!held_by_half(value) && finite(block) && usable_global(bank, global))
        hit(tally, closing_spot_of(number, slot, bank.experts), 1, rank_of(group, n),
            static_cast<int32_t>(to_bits(value)));
    put_bytes(at, to_half(value), 2);
}

// Entry `unit` of experts x groups x N of one bank.
QPN_BOTH void close_unit(const Layer& layer, int64_t number, int64_t unit, Tally* tally) {
    const Bank& bank = layer.bank[number];
    const int64_t n = unit % bank.n, row = unit / bank.n;
    const int64_t group = row % bank.groups(), slot = row / bank.groups();
    if (bank.kind == kInt4)
        close_int4(bank, number, slot, group, n, tally);
    else
        close_e2m1(layer, number, slot, group, n, tally);
}

}  // namespace conversion
}  // namespace qpn
