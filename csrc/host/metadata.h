// Scales, zero points, globals and checks: one source piece at a time, and the closing pass.
#pragma once
#include "../device/layout.cuh"

namespace qpn {

// What one piece found: at most one finding of each kind.
struct Findings {
    Finding found[3];
    int count = 0;
    void add(FindingKind kind, int64_t how_many, int64_t row, int64_t column, int64_t bits) {
        if (how_many) found[count++] = {0, kind, how_many, row, column, bits};
    }
};

// `source` is the first row of the piece; the descriptor has been checked against the bank.
void write_metadata(const Descriptor& piece, const uint8_t* source, const Layer& layer,
                    Findings& findings);

// One expert of one bank, after all of its pieces: interleaves zero points, computes `wide`.
void finish_expert(const Layer& layer, int bank, int64_t slot, Findings& findings);

}  // namespace qpn
