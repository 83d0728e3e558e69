// Scales, zero points, globals and checks: one source piece at a time.
#pragma once
#include "findings.h"

namespace qpn {

// `source` is the first row of the piece; the descriptor has been checked against the bank.
void write_metadata(const Descriptor& piece, const uint8_t* source, const Layer& layer,
                    Findings& findings);

}  // namespace qpn
