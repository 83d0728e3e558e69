// What csrc/launch/convert.cu launches for scales of 32 bits, in loops: the scan of a chunk, and the
// rewriting of planes.
#pragma once
#include <vector>

#include "../../csrc/device/convert.cuh"
#include "../../csrc/launch/pieces.h"

namespace qpn {

inline void settle_formats(const Card& card, const std::vector<Piece>& pieces, const uint8_t* chunk) {
    if (card.layer.checks_fp16()) return;
    constexpr int64_t kUnitsOfBlock = 100;
    for (const Piece& piece : pieces) {
        if (!has_wide_scales(piece)) continue;
        const Job job{piece, chunk + piece.offset, card.layer, card.tally};
        const int64_t units = units_of(piece);
        for (int64_t first = 0; first < units; first += kUnitsOfBlock) {
            Found not_fp16{0, 0}, not_bf16{0, 0};
            for (int64_t unit = first; unit < units && unit < first + kUnitsOfBlock; ++unit)
                scan_unit(job, static_cast<uint32_t>(unit), not_fp16, not_bf16);
            tell(job, not_fp16, not_bf16);
        }
    }
    for (int number = 0; number < 2; ++number) {
        const Bank& bank = card.layer.bank[number];
        if (!turns(bank, card.tally, number)) continue;
        for (int64_t entry = 0; entry < bank.experts * bank.plane(); ++entry) turn_unit(bank, entry);
    }
    turned(card.tally);
}

}  // namespace qpn
