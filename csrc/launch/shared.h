// How much shared memory a kernel may be launched with.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace qpn {

constexpr int64_t kUsualSharedBytes = 48 << 10;  // what a block gets without asking
constexpr int64_t kSystemSharedBytes = 1024;     // the system's, and what kernels have besides

// Leave for a launch with `bytes`, on a card whose blocks have `most`. All that there is is asked
// for, never what one launch needs: another thread may be about to launch the kernel with more. One
// division of cache and shared memory for all kernels: a processor has to run empty to change it.
template <class Arguments>
cudaError_t allow_shared(void (*kernel)(Arguments), int64_t bytes, int64_t most) {
    cudaError_t status = cudaSuccess;
    if (bytes > kUsualSharedBytes)
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      int(most - kSystemSharedBytes));
    if (status == cudaSuccess)
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared);
    return status;
}

}  // namespace qpn
