// Conversion of one chunk, and the closing pass of one layer, on a stream.
#pragma once
#include <cuda_runtime.h>

#include "pieces.h"

namespace qpn {

// kDone where `code` is success, else the error with CUDA's own words.
inline int failed(cudaError_t code, const char* what, Error* error) {
    if (code == cudaSuccess) return kDone;
    refuse(what, -1, error);
    const size_t used = strlen(error->what);
    strncat(error->what, ": ", sizeof error->what - used - 1);
    strncat(error->what, cudaGetErrorString(code), sizeof error->what - used - 3);
    error->error = code;
    return kFailedCuda;
}

// `chunk` lies on the card; `table` on the host, and is done with when the call returns.
int write(const Card& card, const uint8_t* chunk, int64_t chunk_bytes, const Descriptor* table,
          int64_t count, cudaStream_t stream, Error* error);

int finish(const Card& card, cudaStream_t stream, Error* error);

}  // namespace qpn
