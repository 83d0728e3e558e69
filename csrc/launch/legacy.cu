// Launches what `legacy` does with rows.
#include "../device/legacy.cuh"
#include "legacy.h"

namespace qpn {
namespace {

constexpr int kThreads = 128, kRowThreads = 256, kOrderThreads = 512;
constexpr int64_t kMostBlocksAcross = 65535;

__global__ void __launch_bounds__(kRowThreads)
    legacy_keys_kernel(const __grid_constant__ LegacyStep step) {
    legacy_keys(step);
}

__global__ void __launch_bounds__(kOrderThreads)
    legacy_order_kernel(const __grid_constant__ LegacyStep step) {
    legacy_order(step);
}

__global__ void __launch_bounds__(kRowThreads)
    legacy_rank_kernel(const __grid_constant__ LegacyStep step) {
    legacy_rank(step);
}

// Which rows each expert has, and which experts have most.
void route(const LegacyStep& step, cudaStream_t stream) {
    const auto blocks = [](int64_t threads) {
        return unsigned((threads + kRowThreads - 1) / kRowThreads);
    };
    const int64_t rows = step.tokens * step.top_k;
    legacy_keys_kernel<<<blocks(rows), kRowThreads, 0, stream>>>(step);
    legacy_order_kernel<<<unsigned(step.slots), kOrderThreads, 0, stream>>>(step);
    legacy_rank_kernel<<<blocks(step.slots), kRowThreads, 0, stream>>>(step);
}

template <int kFloat, int kEach, int kStage>
__global__ void __launch_bounds__(kThreads)
    legacy_kernel(const __grid_constant__ LegacyStep step,
                  const __grid_constant__ LegacyChunk chunk) {
    if constexpr (kStage == kGather)
        legacy_gather<kFloat, kEach>(step, chunk);
    else if constexpr (kStage == kInner)
        legacy_inner<kFloat, kEach>(step, chunk);
    else if constexpr (kStage == kResults)
        legacy_results<kFloat, kEach>(step, chunk);
    else
        legacy_sum<kFloat, kEach>(step);
}

template <int kFloat, int kEach>
void launch(LegacyStage stage, const LegacyStep& step, const LegacyChunk& chunk, int64_t count,
            cudaStream_t stream) {
    const dim3 places{unsigned(chunk.places), unsigned(count)};
    if (stage == kGather)
        legacy_kernel<kFloat, kEach, kGather><<<places, kThreads, 0, stream>>>(step, chunk);
    else if (stage == kInner)
        legacy_kernel<kFloat, kEach, kInner><<<places, kThreads, 0, stream>>>(step, chunk);
    else if (stage == kResults)
        legacy_kernel<kFloat, kEach, kResults><<<places, kThreads, 0, stream>>>(step, chunk);
    else
        legacy_kernel<kFloat, kEach, kSumOfRows>
            <<<unsigned(step.tokens), kThreads, 0, stream>>>(step, chunk);
}

template <int kFloat>
void launch(bool four, LegacyStage stage, const LegacyStep& step, const LegacyChunk& chunk,
            int64_t count, cudaStream_t stream) {
    if (four)
        launch<kFloat, 4>(stage, step, chunk, count, stream);
    else
        launch<kFloat, 1>(stage, step, chunk, count, stream);
}

int64_t bytes_of(int64_t dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

const char* check(const LegacyCall& call) {
    const int64_t most = int64_t(1) << 31, rows = call.tokens * call.top_k;
    if (call.tokens < 1 || call.top_k < 1 || call.tokens >= most || call.top_k >= most ||
        rows >= most || call.experts < 1 || call.experts >= most || call.slots < 1 ||
        call.slots >= most || call.hidden < 1 || call.hidden >= most || call.width < 1 ||
        call.width >= most / 2)
        return "the sizes of the step are out of range";
    if (call.dtype < kFloat16 || call.dtype > kFloat32 || call.weight_dtype < kFloat16 ||
        call.weight_dtype > kFloat64)
        return "activations or router weights are of a dtype that is not read";
    const int64_t one = bytes_of(call.dtype);
    if (!call.x.holds(call.tokens * call.hidden * one) ||
        !call.out.holds(call.tokens * call.hidden * one) ||
        !call.ids.holds(rows * (call.ids_are_64 ? 8 : 4)) ||
        !call.weights.holds(rows * bytes_of(call.weight_dtype)) ||
        !call.expert_map.holds(call.experts * 4) || !call.keys.holds(rows * 4) ||
        !call.source.holds(rows * 4) || !call.order.holds(rows * 4) ||
        !call.starts.holds(call.slots * 4) || !call.counts.holds(call.slots * 4) ||
        !call.ranked.holds(call.slots * 8) || !call.ranked_counts.holds(call.slots * 4) ||
        !call.results.holds(rows * call.hidden * one))
        return "an input or the output is smaller than its shape";
    return nullptr;
}

const char* check(LegacyStage stage, const LegacyCall& call, const LegacyPlaces& of) {
    if (of.count < 1 || of.count > kMostBlocksAcross || of.first < 0 || of.places < 1 ||
        of.first + of.places > int64_t(INT32_MAX))
        return "the sizes of the chunk are out of range";
    if (!of.ranked.holds(of.count * 8) || !of.counts.holds(of.count * 4))
        return "the experts of the chunk are fewer than it says";
    const int64_t places = of.count * of.places, one = bytes_of(call.dtype);
    const int64_t columns = stage == kInner ? 2 * call.width : call.hidden;
    if (stage == kGather) {
        if (!of.rows.holds(places * call.hidden * one)) return "the gathered rows do not fit";
        return nullptr;
    }
    if (!of.sums.holds(places * columns * 4)) return "the sums are smaller than the chunk";
    if (stage == kInner && !of.inner.holds(places * call.width * one))
        return "the outputs of SwiGLU do not fit";
    const Span& factors = of.factors[stage == kInner ? 0 : 1];
    if (factors.at != nullptr && !factors.holds(of.count * columns * 4))
        return "the factors are smaller than the chunk";
    return nullptr;
}

LegacyStep step_of(const LegacyCall& call) {
    LegacyStep step{};
    step.x = call.x.at;
    step.out = call.out.at;
    step.ids = call.ids.at;
    step.weights = call.weights.at;
    step.expert_map = static_cast<const int32_t*>(call.expert_map.at);
    step.keys = static_cast<int32_t*>(call.keys.at);
    step.source = static_cast<int32_t*>(call.source.at);
    step.order = static_cast<int32_t*>(call.order.at);
    step.starts = static_cast<int32_t*>(call.starts.at);
    step.counts = static_cast<int32_t*>(call.counts.at);
    step.ranked = static_cast<int64_t*>(call.ranked.at);
    step.ranked_counts = static_cast<int32_t*>(call.ranked_counts.at);
    step.results = call.results.at;
    step.tokens = call.tokens;
    step.top_k = int32_t(call.top_k);
    step.experts = int32_t(call.experts);
    step.slots = int32_t(call.slots);
    step.hidden = int32_t(call.hidden);
    step.width = int32_t(call.width);
    step.ids_are_64 = int32_t(call.ids_are_64);
    step.weight_dtype = int32_t(call.weight_dtype);
    return step;
}

LegacyChunk chunk_of(LegacyStage stage, const LegacyPlaces& of) {
    LegacyChunk chunk{};
    chunk.ranked = static_cast<const int64_t*>(of.ranked.at);
    chunk.counts = static_cast<const int32_t*>(of.counts.at);
    chunk.rows = of.rows.at;
    chunk.sums = static_cast<float*>(of.sums.at);
    chunk.inner = of.inner.at;
    chunk.factors = static_cast<const float*>(of.factors[stage == kInner ? 0 : 1].at);
    chunk.first = int32_t(of.first);
    chunk.places = int32_t(of.places);
    return chunk;
}

// Four numbers at a time where every row begins at a multiple of them.
bool by_fours(const LegacyCall& call, const LegacyPlaces& of) {
    uintptr_t together = 0;
    for (const Span* span : {&call.x, &call.out, &call.results, &of.rows, &of.sums, &of.inner,
                             &of.factors[0], &of.factors[1]})
        together |= reinterpret_cast<uintptr_t>(span->at);
    return call.hidden % 4 == 0 && call.width % 4 == 0 && together % 16 == 0;
}

}  // namespace

const char* legacy(LegacyStage stage, const LegacyCall& call, const LegacyPlaces& places,
                   cudaStream_t stream, cudaError_t& status) {
    const char* wrong = check(call);
    if (wrong != nullptr) return wrong;
    const bool of_a_chunk = stage == kGather || stage == kInner || stage == kResults;
    if (of_a_chunk) wrong = check(stage, call, places);
    if (wrong != nullptr) return wrong;
    const LegacyStep step = step_of(call);
    if (stage == kRoute) {
        route(step, stream);
    } else {
        const LegacyChunk chunk = of_a_chunk ? chunk_of(stage, places) : LegacyChunk{};
        const bool four = by_fours(call, of_a_chunk ? places : LegacyPlaces{});
        if (call.dtype == kFloat16)
            launch<kFloat16>(four, stage, step, chunk, places.count, stream);
        else if (call.dtype == kBfloat16)
            launch<kBfloat16>(four, stage, step, chunk, places.count, stream);
        else
            launch<kFloat32>(four, stage, step, chunk, places.count, stream);
    }
    status = cudaGetLastError();
    return nullptr;
}

}  // namespace qpn
