// One chunk of source bytes into the banks of one layer, and the closing pass.
#pragma once
#include <string>
#include <vector>

#include "codes.h"
#include "../device/layout.cuh"

namespace qpn {

// Where source bytes come from: memory, or a file that each thread reads into its own buffer.
struct Source {
    const uint8_t* memory;  // null when reading from `file`
    int file;
    int64_t bytes;  // length that offsets may reach
};

struct Failure {
    std::string what;      // empty when nothing failed
    int64_t subject = -1;  // descriptor, where one is to blame
    int64_t offset = -1;   // file offset of a failed read
    int64_t wanted = 0, got = 0;
    int error = 0;  // errno of a failed read
};

// `buffers` holds `threads` buffers of `buffer_bytes` each (unused when reading from memory).
Failure write(const Source& source, const Descriptor* pieces, int64_t count, const Layer& layer,
              const CodesKernels& kernels, int threads, uint8_t* buffers, int64_t buffer_bytes,
              std::vector<Finding>& findings);

Failure finish(const Layer& layer, int threads, std::vector<Finding>& findings);

}  // namespace qpn
