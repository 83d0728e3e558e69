// Findings: values that a piece or a closing pass refuses, counted with the first of them.
#pragma once
#include "../device/floats.cuh"
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

// Counts values that a test refuses, and remembers the first in row-major order.
struct Bad {
    int64_t count = 0, row = 0, column = 0, bits = 0;
    void hit(int64_t at_row, int64_t at_column, int64_t value) {
        const bool earlier = at_row < row || (at_row == row && at_column < column);
        if (count++ == 0 || earlier) row = at_row, column = at_column, bits = value;
    }
    void report(Findings& findings, FindingKind kind) const {
        findings.add(kind, count, row, column, bits);
    }
};

// Positive and finite, and as a divisor one with a finite reciprocal.
inline bool usable_global(const Bank& bank, float value) {
    return finite(value) && value > 0 && (bank.sense != kDivisor || finite(1.0f / value));
}

}  // namespace qpn
