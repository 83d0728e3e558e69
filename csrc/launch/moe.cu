// Which launches make one decode step, and how large they are.
#include "../device/closing.cuh"
#include "kernels.h"
#include "shared.h"

namespace qpn {
namespace {

int64_t rounded_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

struct Processor {
    int processors = 0, major = 0, block_bytes = 0;
    cudaError_t status = cudaSuccess;
    Processor() {
        int device = 0;
        status = cudaGetDevice(&device);
        read(processors, cudaDevAttrMultiProcessorCount, device);
        read(major, cudaDevAttrComputeCapabilityMajor, device);
        read(block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    void read(int& value, cudaDeviceAttr what, int device) {
        if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, what, device);
    }
};

struct Launcher {
    const MoeCall& call;
    Step& step;
    const Processor card;
    bool fused;
    cudaStream_t stream;

    // With the leave to start before the launch before has ended, where the card knows that.
    template <class Arguments>
    cudaError_t run(void (*kernel)(Arguments), dim3 grid, int32_t warps, int64_t shared,
                    const Arguments& arguments) const {
        const cudaError_t status = allow_shared(kernel, shared, card.block_bytes);
        if (status != cudaSuccess) return status;
        cudaLaunchConfig_t config{};
        config.gridDim = grid;
        config.blockDim = dim3(unsigned(warps) * 32);
        config.dynamicSmemBytes = size_t(shared);
        config.stream = stream;
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.attrs = &attribute;
        config.numAttrs = card.major >= 9 ? 1 : 0;
        return cudaLaunchKernelEx(&config, kernel, arguments);
    }

    // False where these kernels do not take it: then the step goes by passes.
    bool one_token(cudaError_t& status) {
        if (call.family != kM16n8k16 || fused || call.top_k > kMostChosen ||
            step.w13.kind != step.w2.kind)
            return false;
        const auto pick = call.dtype == kBfloat16 ? one_bf16 : one_half;
        const OneKernel first = pick(step.w13, true), second = pick(step.w2, false);
        const int64_t tasks = call.top_k * step.w13.tiles;
        const int32_t blocks = int32_t(tasks < card.processors ? tasks : card.processors);
        OneStep one{step.w13,
                    step.x,
                    step.out,
                    step.ids,
                    step.weights,
                    step.expert_map,
                    reinterpret_cast<uint8_t*>(step.hidden),
                    step.top_k,
                    step.experts,
                    step.ids_are_64,
                    step.weight_dtype,
                    step.w2.chunks(),
                    partials_of(int32_t((tasks + blocks - 1) / blocks))};
        OneStep two = one;
        two.bank = step.w2;
        two.partials = partials_of(step.top_k);
        int64_t bytes13 = one_bytes(one, 1, first);
        const int64_t bytes2 = one_bytes(two, step.top_k, second);
        const int64_t most = card.block_bytes - kSystemSharedBytes;
        if (bytes13 > most || bytes2 > most) return false;
        // One block of W13 a processor, never two: W2 starts beside it, and then all end together.
        if (bytes13 + bytes2 <= card.block_bytes && bytes13 <= card.block_bytes / 2)
            bytes13 = card.block_bytes / 2 + 1024;
        status = run(first.run, dim3(unsigned(blocks)), kPairWarps, bytes13, one);
        if (status == cudaSuccess)
            status = run(second.run, dim3(unsigned(step.w2.tiles)), kPairWarps, bytes2, two);
        return true;
    }

    static int64_t one_bytes(const OneStep& one, int32_t rows, const OneKernel& kernel) {
        return OneLayout(one.bank.chunks(), rows, one.partials, kOneAhead, kernel.slot_bytes).bytes;
    }

    // False where the compaction does not fit into one block's shared memory.
    bool passes(cudaError_t& status) {
        const int64_t rows = call.tokens * call.top_k, experts = step.w13.experts;
        const Choice choice{call.dtype, call.family, fused};
        const Kernel first = choice.fastest(kFirst, step.w13, experts, rows, card.block_bytes);
        const Kernel second = choice.fastest(kSecond, step.w2, experts, rows, card.block_bytes);
        const int64_t one = first.shared_bytes(step.w13, experts, rows),
                      two = second.shared_bytes(step.w2, experts, rows);
        if (one > card.block_bytes - kSystemSharedBytes ||
            two > card.block_bytes - kSystemSharedBytes)
            return false;
        step.splits13 = splits_of(step.w13, first.warps, 2);
        step.splits2 = splits_of(step.w2, second.warps, 4);
        const auto launch = [&](const Kernel& kernel, const Bank& bank, int64_t bytes) {
            const int64_t tasks = rows * bank.tiles, most = kernel.blocks * card.processors;
            return run(kernel.run, dim3(unsigned(tasks < most ? tasks : most)), kernel.warps, bytes,
                       step);
        };
        status = launch(first, step.w13, one);
        if (status == cudaSuccess) status = launch(second, step.w2, two);
        if (status != cudaSuccess) return true;
        const Kernel sum = choice.any(kSum, step.w2);
        const int64_t columns = int64_t(sum.warps) * 32 * 8;
        status =
            run(sum.run,
                dim3(unsigned(rounded_up(step.w2.n, columns) / columns), unsigned(call.tokens)),
                sum.warps, 0, step);
        return true;
    }

    // Warps that share the K of a tile: a power of two that leaves each `least` chunks or more.
    static int splits_of(const Bank& bank, int warps, int least) {
        int splits = 1;
        while (splits < warps && bank.chunks() >= 2 * splits * least) splits *= 2;
        return splits;
    }
};

int64_t hidden_pitch(const Step& step) { return int64_t(step.w2.blocks) * kBlockRows; }

int64_t hidden_bytes(const Step& step, int64_t rows) {
    return rounded_up(rows * hidden_pitch(step) * 2, 256);
}

const char* check(const MoeCall& call, const Step& step) {
    const int64_t rows = call.tokens * call.top_k;
    if (call.tokens < 1 || call.top_k < 1 || call.experts < 1 || call.tokens > kMostRows ||
        call.top_k > kMostRows || rows > kMostRows)
        return "the number of rows is not that of a decode step";
    if (call.dtype != kFloat16 && call.dtype != kBfloat16)
        return "the kernels take fp16 and bf16 activations";
    if (call.family != kQuadpair && call.family != kM16n8k16) return "no such family of kernels";
    if (call.family == kQuadpair && call.dtype != kFloat16)
        return "the quadpair kernels take fp16 activations only";
    if (call.weight_dtype < kFloat16 || call.weight_dtype > kFloat64)
        return "router weights of this dtype are not read";
    const int64_t weight_bytes = call.weight_dtype == kFloat64   ? 8
                                 : call.weight_dtype == kFloat32 ? 4
                                                                 : 2;
    if (call.x_bytes < call.tokens * step.w13.k * 2 ||
        call.out_bytes < call.tokens * step.w2.n * 2 ||
        call.ids_bytes < rows * (call.ids_are_64 ? 8 : 4) ||
        call.weights_bytes < rows * weight_bytes || call.expert_map_bytes < call.experts * 4)
        return "an input or the output is smaller than its shape";
    if (call.scratch_bytes < moe_scratch_bytes(step, call.tokens, call.top_k))
        return "the scratch is smaller than this many tokens need";
    for (const void* pointer :
         {call.x, static_cast<const void*>(call.out), static_cast<const void*>(call.scratch)})
        if (reinterpret_cast<uintptr_t>(pointer) % 16)
            return "activations, output or scratch are off their boundary of 16 bytes";
    return nullptr;
}

}  // namespace

int64_t moe_scratch_bytes(const Step& step, int64_t tokens, int64_t top_k) {
    const int64_t rows = tokens * top_k;
    const int64_t passes = hidden_bytes(step, rows) + rows * step.w2.n * 2;
    const int64_t one = top_k * step.w2.chunks() * int64_t(kDigitRowBytes);
    return passes > one ? passes : one;
}

const char* moe(const MoeCall& call, Step& step, bool fused, cudaStream_t stream,
                cudaError_t& status) {
    const char* wrong = check(call, step);
    if (wrong != nullptr) return wrong;
    step.x = static_cast<const uint16_t*>(call.x);
    step.out = static_cast<uint16_t*>(call.out);
    step.ids = call.ids;
    step.weights = call.weights;
    step.expert_map = static_cast<const int32_t*>(call.expert_map);
    step.hidden = static_cast<uint16_t*>(call.scratch);
    step.y = step.hidden + hidden_bytes(step, call.tokens * call.top_k) / 2;
    step.tokens = int32_t(call.tokens);
    step.top_k = int32_t(call.top_k);
    step.experts = int32_t(call.experts);
    step.ids_are_64 = int32_t(call.ids_are_64);
    step.weight_dtype = int32_t(call.weight_dtype);
    step.hidden_pitch = int32_t(hidden_pitch(step));
    Launcher launcher{call, step, Processor(), fused, stream};
    status = launcher.card.status;
    if (status != cudaSuccess) return nullptr;
    const bool one = call.in_router_order && call.tokens == 1;
    if (!(one && launcher.one_token(status)) && !launcher.passes(status))
        return "more rows or experts than one step of these kernels takes";
    return nullptr;
}

}  // namespace qpn
