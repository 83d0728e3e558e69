// Every number that comes with a call is checked against its buffers before the first write.
#pragma once
#include <string>

#include "../device/layout.cuh"

namespace qpn {

// Empty when sound, else what is wrong. Converting needs the conversion cache too.
std::string check_layer(const Layer& layer, bool converts);

// Features of the row axis in one source row.
int64_t row_features(int64_t role);

// `chunk_bytes` is the length that offsets may reach.
std::string check_descriptor(const Descriptor& piece, const Layer& layer, int64_t chunk_bytes);

}  // namespace qpn
