// The C interface of the decode step on a card.
#include "error.h"
#include "linear.h"

#define QPN_API extern "C" __attribute__((visibility("default")))

namespace {

int told(const char* wrong, cudaError_t status, qpn::Error* error) {
    if (wrong != nullptr) return qpn::refuse(wrong, -1, error);
    if (status == cudaSuccess) return qpn::kDone;
    cudaGetLastError();  // taken: the next call starts clean
    qpn::refuse(cudaGetErrorString(status), -1, error);
    error->error = status;
    return qpn::kFailedCuda;
}

}  // namespace

// Scratch bytes of one step, or -1 where the numbers are not those of a layer.
QPN_API int64_t qpn_cuda_moe_scratch(const int64_t* numbers, int64_t tokens, int64_t top_k) {
    qpn::Step step{};
    const int64_t *w13 = numbers + 1, *w2 = numbers + 11;
    if (!qpn::shape_bank(step.w13, w13[2], w13[3], w13[4], w13[5], w13[6], w13[7])) return -1;
    if (!qpn::shape_bank(step.w2, w2[2], w2[3], w2[4], w2[5], w2[6], w2[7])) return -1;
    return qpn::moe_scratch_bytes(step, tokens, top_k);
}

QPN_API int qpn_cuda_moe(const qpn::MoeCall* call, const int64_t* numbers, void* const* tensors,
                         const int64_t* tensor_bytes, int64_t tensor_count, void* stream,
                         qpn::Error* error) {
    qpn::Step step{};
    bool fused = false;
    cudaError_t status = cudaSuccess;
    const char* wrong = qpn::read_banks(numbers, tensors, tensor_bytes, tensor_count, step, fused);
    if (wrong == nullptr)
        wrong = qpn::moe(*call, step, fused, static_cast<cudaStream_t>(stream), status);
    return told(wrong, status, error);
}

// One linear for so few tokens that its bank is multiplied as it is.
QPN_API int qpn_cuda_linear(const qpn::LinearCall* call, const int64_t* numbers,
                            void* const* tensors, const int64_t* tensor_bytes, int64_t tensor_count,
                            void* stream, qpn::Error* error) {
    qpn::Step step{};
    bool fused = false;
    cudaError_t status = cudaSuccess;
    const char* wrong = qpn::read_linear(numbers, tensors, tensor_bytes, tensor_count, step, fused);
    if (wrong == nullptr)
        wrong = qpn::linear(*call, step, fused, static_cast<cudaStream_t>(stream), status);
    return told(wrong, status, error);
}
