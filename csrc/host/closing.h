// The closing pass: what can be computed once all pieces of an expert are there.
#pragma once
#include "findings.h"

namespace qpn {

// One expert of one bank, after all of its pieces: interleaves zero points, computes `wide`.
void finish_expert(const Layer& layer, int bank, int64_t slot, Findings& findings);

}  // namespace qpn
