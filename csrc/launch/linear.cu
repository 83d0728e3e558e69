// The product of a linear by the kernels of W2: every token is a row of one expert, and what they
// leave for the weighted sum is the output.
#include "linear.h"

#include "kernels.h"
#include "shared.h"

namespace qpn {
namespace {

// More tokens than that are dequantized: passes of eight rows would read the bank too often.
constexpr int kMostTokens = 1024;

// Ids of all rows, and the map of the one expert.
__device__ int32_t zeros[kMostTokens];

const char* check(const LinearCall& call, const Bank& bank) {
    if (call.tokens < 1 || call.tokens > kMostTokens)
        return "the number of tokens is not that of a decode step";
    if (call.dtype != kFloat16 && call.dtype != kBfloat16)
        return "the kernels take fp16 and bf16 activations";
    if (call.family != kQuadpair && call.family != kM16n8k16) return "no such family of kernels";
    if (call.family == kQuadpair && call.dtype != kFloat16)
        return "the quadpair kernels take fp16 activations only";
    if (call.x_bytes < call.tokens * bank.k * 2 || call.out_bytes < call.tokens * bank.n * 2)
        return "the input or the output is smaller than its shape";
    if (reinterpret_cast<uintptr_t>(call.x) % 16 || reinterpret_cast<uintptr_t>(call.out) % 16)
        return "activations or output are off their boundary of 16 bytes";
    return nullptr;
}

// Warps that share the K of a tile: a power of two that leaves each four chunks or more.
int32_t splits_of(const Bank& bank, int32_t warps) {
    int32_t splits = 1;
    while (splits < warps && bank.chunks() >= 8 * splits) splits *= 2;
    return splits;
}

cudaError_t launch(const Choice& choice, Step& step, cudaStream_t stream) {
    int device = 0, processors = 0, block_bytes = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (status == cudaSuccess)
        status =
            cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess) return status;
    const Kernel kernel = choice.fastest(kSecond, step.w2, 1, step.tokens, block_bytes);
    step.splits2 = splits_of(step.w2, kernel.warps);
    const int64_t bytes = kernel.shared_bytes(step.w2, 1, step.tokens);
    status = allow_shared(kernel.run, bytes, block_bytes);
    if (status != cudaSuccess) return status;
    const int64_t passes = (step.tokens + kPassRows - 1) / kPassRows;
    const int64_t tasks = passes * step.w2.tiles, most = kernel.blocks * processors;
    kernel.run<<<unsigned(tasks < most ? tasks : most), unsigned(kernel.warps) * 32, size_t(bytes),
                 stream>>>(step);
    return cudaGetLastError();
}

}  // namespace

const char* linear(const LinearCall& call, Step& step, bool fused, cudaStream_t stream,
                   cudaError_t& status) {
    const char* wrong = check(call, step.w2);
    if (wrong != nullptr) return wrong;
    void* none = nullptr;
    status = cudaGetSymbolAddress(&none, zeros);
    if (status != cudaSuccess) return nullptr;
    step.w13 = step.w2;  // as many experts: that is all that W2 asks of it
    step.ids = step.weights = none;
    step.expert_map = static_cast<const int32_t*>(none);
    step.hidden = static_cast<uint16_t*>(const_cast<void*>(call.x));
    step.hidden_pitch = step.w2.k;
    step.y = static_cast<uint16_t*>(call.out);
    step.tokens = int32_t(call.tokens);
    step.top_k = step.experts = 1;
    step.ids_are_64 = 0;
    step.weight_dtype = kFloat32;
    status = launch({call.dtype, call.family, fused}, step, stream);
    return nullptr;
}

}  // namespace qpn
