// The C interface of the decode step on a card.
#include "kernels.h"
#include "linear.h"
#include "told.h"

#define QPN_API extern "C" __attribute__((visibility("default")))

namespace {

// The banks of a layer without their tensors; false where the numbers are not those of a layer.
bool shaped(const int64_t* numbers, qpn::Step& step) {
    for (qpn::Bank* bank : {&step.w13, &step.w2}) {
        const int64_t* own = numbers + (bank == &step.w13 ? 1 : 11);
        bank->kind = int32_t(own[0]);
        bank->layout = int32_t(own[1]);
        if (!qpn::shape_bank(*bank, own[2], own[3], own[4], own[5], own[6], own[7])) return false;
    }
    return true;
}

}  // namespace

// Scratch bytes of one step, or -1 where the numbers are not those of a layer.
QPN_API int64_t qpn_cuda_moe_scratch(const int64_t* numbers, int64_t tokens, int64_t top_k) {
    qpn::Step step{};
    return shaped(numbers, step) ? qpn::moe_scratch_bytes(step, tokens, top_k) : -1;
}

// Most rows (tokens times top-k) of one step of the fast routes on a card whose blocks have so much
// shared memory, or -1 where the numbers are not those of a layer.
QPN_API int64_t qpn_cuda_moe_most_rows(const int64_t* numbers, int64_t dtype, int64_t family,
                                       int64_t block_bytes) {
    qpn::Step step{};
    if (!shaped(numbers, step)) return -1;
    return qpn::moe_most_rows(step, {dtype, family, numbers[0] != 0}, block_bytes);
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
    return qpn::told(wrong, status, error);
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
    return qpn::told(wrong, status, error);
}
