// The C interface of `legacy` on a card.
#include "legacy.h"
#include "linear.h"
#include "moe.h"
#include "told.h"

#define QPN_API extern "C" __attribute__((visibility("default")))

// What is done with rows: LegacyStage. `places` may be null for a stage of the whole step.
QPN_API int qpn_cuda_legacy(int stage, const qpn::LegacyCall* call, const qpn::LegacyPlaces* places,
                            void* stream, qpn::Error* error) {
    cudaError_t status = cudaSuccess;
    if (stage < qpn::kRoute || stage > qpn::kSumOfRows)
        return qpn::told("there is no such stage", status, error);
    const qpn::LegacyPlaces none{};
    const char* wrong =
        qpn::legacy(qpn::LegacyStage(stage), *call, places == nullptr ? none : *places,
                    static_cast<cudaStream_t>(stream), status);
    return qpn::told(wrong, status, error);
}

// Weights of tiles of some experts of one bank (0: W13, 1: W2); see device/dequantize.cuh.
QPN_API int qpn_cuda_dequantize(int bank, const qpn::LegacyWeights* weights, const int64_t* numbers,
                                void* const* tensors, const int64_t* tensor_bytes,
                                int64_t tensor_count, void* stream, qpn::Error* error) {
    qpn::Step step{};
    bool fused = false;
    cudaError_t status = cudaSuccess;
    const auto read = qpn::is_linear(numbers) ? qpn::read_linear : qpn::read_banks;
    const char* wrong = read(numbers, tensors, tensor_bytes, tensor_count, step, fused);
    if (wrong == nullptr)
        wrong = qpn::dequantize(bank == 0 ? step.w13 : step.w2, fused, *weights,
                                static_cast<cudaStream_t>(stream), status);
    return qpn::told(wrong, status, error);
}
