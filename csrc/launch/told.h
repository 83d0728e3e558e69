// What a call that launches says when it fails: what does not fit, or what CUDA says.
#pragma once
#include <cuda_runtime.h>

#include "../host/error.h"

namespace qpn {

inline int told(const char* wrong, cudaError_t status, Error* error) {
    if (wrong != nullptr) return refuse(wrong, -1, error);
    if (status == cudaSuccess) return kDone;
    cudaGetLastError();  // taken: the next call starts clean
    refuse(cudaGetErrorString(status), -1, error);
    error->error = status;
    return kFailedCuda;
}

}  // namespace qpn
