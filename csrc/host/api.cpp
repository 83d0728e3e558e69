// The C interface that loader/core.py calls. Raw pointers come with their capacities; nothing here
// knows of Python or PyTorch, so one build serves every PyTorch.
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "error.h"
#include "linear.h"
#include "moe.h"
#include "pool.h"
#include "tiles.h"
#include "write.h"

#define QPN_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kLayerNumbers = 21;  // LayerSpec.to_ints of loader/bank.py

bool read_layer(const int64_t* numbers, void* const* tensors, const int64_t* bytes, int64_t count,
                float* cache, int64_t cache_bytes, qpn::Layer& layer) {
    layer.fused_bias = numbers[0] != 0;
    layer.cache = cache;
    layer.cache_bytes = cache_bytes;
    int64_t next = 0;
    for (int b = 0; b < 2; ++b) {
        qpn::Bank& bank = layer.bank[b];
        memcpy(&bank, numbers + 1 + 10 * b, 10 * sizeof(int64_t));
        memset(bank.tensor, 0, sizeof bank.tensor);
        for (int t = 0; t < bank.tensors(); ++t, ++next) {
            if (next >= count) return false;
            bank.tensor[t] = static_cast<uint8_t*>(tensors[next]);
            bank.bytes[t] = bytes[next];
        }
    }
    return next == count;
}

const qpn::CodesKernels& kernels(int isa) {
#ifdef QPN_X86
    if (isa == 2) return qpn::kCodesAvx512;
    if (isa == 1) return qpn::kCodesAvx2;
#endif
    return qpn::kCodesPortable;
}

int give(const qpn::Failure& failure, qpn::Error* error) {
    if (failure.what.empty()) return qpn::kDone;
    qpn::refuse(failure.what.c_str(), failure.subject, error);
    error->offset = failure.offset;
    error->wanted = failure.wanted;
    error->got = failure.got;
    error->error = failure.error;
    return failure.offset >= 0 ? qpn::kFailedRead : qpn::kRefused;
}

int give_findings(const std::vector<qpn::Finding>& found, int64_t* rows, int64_t most, int64_t* count) {
    *count = static_cast<int64_t>(found.size());
    const int64_t fit = std::min(most, *count);
    if (fit > 0) memcpy(rows, found.data(), static_cast<size_t>(fit) * sizeof(qpn::Finding));
    return 0;
}

int fail(const char* what, qpn::Error* error) { return qpn::refuse(what, -1, error); }

}  // namespace

// The widest instruction set of this build that this machine runs: 0 portable, 1 AVX2, 2 AVX-512.
QPN_API int qpn_isa(void) {
#ifdef QPN_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (avx2) return 1;
#endif
    return 0;
}

QPN_API const char* qpn_isa_name(int isa) { return kernels(isa).name; }

// A call returns a Code of error.h; `error` says what.
QPN_API int qpn_write(const uint8_t* memory, int file, int64_t bytes, const int64_t* descriptors,
                      int64_t pieces, const int64_t* layer_numbers, void* const* tensors,
                      const int64_t* tensor_bytes, int64_t tensor_count, float* cache,
                      int64_t cache_bytes, int isa, int threads, uint8_t* buffers,
                      int64_t buffer_bytes, int64_t* findings, int64_t most, int64_t* found,
                      qpn::Error* error) try {
    qpn::Layer layer;
    if (!read_layer(layer_numbers, tensors, tensor_bytes, tensor_count, cache, cache_bytes, layer))
        return fail("the tensors are not those of the layer", error);
    std::vector<qpn::Finding> rows;
    const qpn::Source source{memory, file, bytes};
    const auto* table = reinterpret_cast<const qpn::Descriptor*>(descriptors);
    const qpn::Failure failure = qpn::write(source, table, pieces, layer, kernels(isa), threads,
                                            buffers, buffer_bytes, rows);
    give_findings(rows, findings, most, found);
    return give(failure, error);
} catch (...) {
    return qpn::caught(error);
}

QPN_API int qpn_finish(const int64_t* layer_numbers, void* const* tensors,
                       const int64_t* tensor_bytes, int64_t tensor_count, float* cache,
                       int64_t cache_bytes, int threads, int64_t* findings, int64_t most,
                       int64_t* found, qpn::Error* error) try {
    qpn::Layer layer;
    if (!read_layer(layer_numbers, tensors, tensor_bytes, tensor_count, cache, cache_bytes, layer))
        return fail("the tensors are not those of the layer", error);
    std::vector<qpn::Finding> rows;
    const qpn::Failure failure = qpn::finish(layer, threads, rows);
    give_findings(rows, findings, most, found);
    return give(failure, error);
} catch (...) {
    return qpn::caught(error);
}

// Makes the pages of a fresh mapping present, many to a system call and on several threads: a fault
// for each page costs more than clearing it. A hint: where the kernel cannot, pages come when touched.
QPN_API void qpn_populate(uint8_t* memory, int64_t bytes, int threads) {
#ifdef MADV_POPULATE_WRITE
    constexpr int64_t kPart = 256 << 10;
    try {
        qpn::parallel(threads, (bytes + kPart - 1) / kPart, [&](int64_t n, int) {
            const int64_t part = std::min(kPart, bytes - n * kPart);
            madvise(memory + n * kPart, static_cast<size_t>(part), MADV_POPULATE_WRITE);
        });
    } catch (const std::exception&) {  // no memory for the threads: no harm is done
    }
#else
    (void)memory, (void)bytes, (void)threads;
#endif
}

// Raised with every change of a call, of its structs or of what their numbers mean.
QPN_API int qpn_interface(void) { return 3; }

namespace {

const qpn::TileKernels& tile_kernels(int isa) {
#ifdef QPN_X86
    if (isa == 2 && __builtin_cpu_supports("avx512vnni")) return qpn::kTilesAvx512;
    if (isa >= 1) return qpn::kTilesAvx2;
#endif
    return qpn::kTilesPortable;
}

}  // namespace

struct QpnMoe {
    int64_t tokens, top_k, experts, dtype, weight_dtype, ids_are_64, scratch_bytes;
    const void *x, *ids, *weights;
    const int32_t* expert_map;
    void* out;
    uint8_t* scratch;
};

QPN_API int qpn_moe(const QpnMoe* step, const int64_t* layer_numbers, void* const* tensors,
                    const int64_t* tensor_bytes, int64_t tensor_count, int isa, int threads,
                    qpn::Error* error) try {
    qpn::Layer layer;
    if (!read_layer(layer_numbers, tensors, tensor_bytes, tensor_count, nullptr, 0, layer))
        return fail("the tensors are not those of the layer", error);
    const qpn::MoeCall call{&layer,           step->tokens,       step->top_k,      step->experts,
                            step->dtype,      step->weight_dtype, step->x,          step->ids,
                            step->ids_are_64 != 0, step->weights, step->expert_map, step->out,
                            step->scratch,    step->scratch_bytes};
    const std::string wrong = qpn::moe(call, tile_kernels(isa), threads);
    return wrong.empty() ? 0 : fail(wrong.c_str(), error);
} catch (...) {
    return qpn::caught(error);
}

// Scratch bytes of one step, or -1 where the numbers are not those of a layer.
QPN_API int64_t qpn_moe_scratch(const int64_t* layer_numbers, int64_t tokens, int64_t top_k) {
    qpn::Layer layer{};
    for (int b = 0; b < 2; ++b) memcpy(&layer.bank[b], layer_numbers + 1 + 10 * b, 80);
    return qpn::moe_scratch_bytes(layer, tokens, top_k);
}

struct QpnLinear {
    int64_t tokens, dtype, bias_dtype, scratch_bytes;
    const void *x, *bias;
    void* out;
    uint8_t* scratch;
};

QPN_API int qpn_linear(const QpnLinear* step, const int64_t* layer_numbers, void* const* tensors,
                       const int64_t* tensor_bytes, int64_t tensor_count, int isa, int threads,
                       qpn::Error* error) try {
    qpn::Layer layer;
    if (!read_layer(layer_numbers, tensors, tensor_bytes, tensor_count, nullptr, 0, layer))
        return fail("the tensors are not those of the layer", error);
    const qpn::LinearCall call{&layer,     step->tokens, step->dtype,   step->bias_dtype,   step->x,
                               step->bias, step->out,    step->scratch, step->scratch_bytes};
    const std::string wrong = qpn::linear(call, tile_kernels(isa), threads);
    return wrong.empty() ? 0 : fail(wrong.c_str(), error);
} catch (...) {
    return qpn::caught(error);
}

QPN_API int64_t qpn_linear_scratch(const int64_t* layer_numbers, int64_t tokens) {
    qpn::Layer layer{};
    for (int b = 0; b < 2; ++b) memcpy(&layer.bank[b], layer_numbers + 1 + 10 * b, 80);
    return qpn::linear_scratch_bytes(layer, tokens);
}

// Weights of tiles [first, last) of one expert of one bank, fp32 (columns, K).
QPN_API int qpn_dequantize(int bank, int64_t slot, int64_t first, int64_t last, float* out,
                           int64_t out_floats, const int64_t* layer_numbers, void* const* tensors,
                           const int64_t* tensor_bytes, int64_t tensor_count, int isa, int threads,
                           qpn::Error* error) try {
    qpn::Layer layer;
    if (!read_layer(layer_numbers, tensors, tensor_bytes, tensor_count, nullptr, 0, layer))
        return fail("the tensors are not those of the layer", error);
    const std::string wrong =
        qpn::dequantize({&layer, bank, slot, first, last, out, out_floats}, tile_kernels(isa), threads);
    return wrong.empty() ? 0 : fail(wrong.c_str(), error);
} catch (...) {
    return qpn::caught(error);
}
