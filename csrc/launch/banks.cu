// Banks from the numbers and tensors that operators take.
#include "linear.h"

namespace qpn {
namespace {

constexpr int64_t kNumbersOfBank = 10;
constexpr int64_t kAbsent = 3;  // KINDS of loader/bank.py: W13 of a linear

int64_t plane_bytes(const Bank& bank, int tensor) {
    const int64_t entries = int64_t(bank.experts) * bank.groups * bank.np();
    if (tensor == 0) return int64_t(bank.experts) * bank.tile_at(1, 0) * 4;
    if (bank.kind == kE2m1) {
        if (tensor == 2) return int64_t(bank.experts) * bank.projections * 4;
        return entries * bank.entry_bytes;
    }
    return tensor == 2 ? entries / 2 : entries * bank.entry_bytes;
}

const char* read_bank(const int64_t* numbers, void* const* tensors, const int64_t* bytes,
                      int64_t count, int64_t& used, Bank& bank) {
    bank.kind = int32_t(numbers[0]);
    bank.layout = int32_t(numbers[1]);
    bank.scale_dtype = int32_t(numbers[8]);
    bank.sense = int32_t(numbers[9]);
    if (bank.kind != kInt4 && bank.kind != kE2m1)
        return "the kernels read int4 and e2m1 banks only";
    if (bank.layout < kCompact || bank.layout > kWide ||
        (bank.kind == kE2m1 && bank.layout == kRecord))
        return "the metadata layout is not one that the kernels read";
    if (!shape_bank(bank, numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]))
        return "the sizes of a bank are out of range";
    if (bank.k % kRowsPerWord) return "K of a bank is no multiple of 8";
    bank.entry_bytes = bank.kind == kE2m1 ? (bank.layout == kWide ? 2 : 1)
                                          : (bank.layout == kCompact  ? 2
                                             : bank.layout == kRecord ? 3
                                                                      : 4);
    const bool three = bank.layout == kCompact;
    const int64_t needs = three ? 3 : 2;
    if (used + needs > count) return "tensors of a bank are missing";
    for (int64_t i = 0; i < needs; ++i) {
        if (bytes[used + i] < plane_bytes(bank, int(i))) return "a tensor of a bank is too small";
        if (reinterpret_cast<uintptr_t>(tensors[used + i]) % 16)
            return "a tensor of a bank is off its boundary of 16 bytes";
    }
    bank.words = static_cast<const uint32_t*>(tensors[used]);
    bank.plane = static_cast<const uint8_t*>(tensors[used + 1]);
    bank.second = three ? static_cast<const uint8_t*>(tensors[used + 2]) : nullptr;
    used += needs;
    return nullptr;
}

}  // namespace

const char* read_banks(const int64_t* numbers, void* const* tensors, const int64_t* bytes,
                       int64_t count, Step& step, bool& fused) {
    fused = numbers[0] != 0;
    int64_t used = 0;
    const char* wrong = read_bank(numbers + 1, tensors, bytes, count, used, step.w13);
    if (wrong == nullptr)
        wrong = read_bank(numbers + 1 + kNumbersOfBank, tensors, bytes, count, used, step.w2);
    if (wrong != nullptr) return wrong;
    if (step.w13.projections != 2 || step.w2.projections != 1 || step.w13.columns() != step.w2.k ||
        step.w13.k != step.w2.n || step.w13.experts != step.w2.experts ||
        step.w13.kind != step.w2.kind || step.w13.layout != step.w2.layout)
        return "the banks of the layer do not belong together";
    return nullptr;
}

bool is_linear(const int64_t* numbers) { return numbers[1] == kAbsent; }

const char* read_linear(const int64_t* numbers, void* const* tensors, const int64_t* bytes,
                        int64_t count, Step& step, bool& fused) {
    fused = numbers[0] != 0;
    int64_t used = 0;
    if (!is_linear(numbers)) return "the numbers are those of a layer, not of a linear";
    const char* wrong =
        read_bank(numbers + 1 + kNumbersOfBank, tensors, bytes, count, used, step.w2);
    if (wrong != nullptr) return wrong;
    if (step.w2.projections != 1 || step.w2.experts != 1)
        return "the bank of a linear has one expert and one projection";
    return nullptr;
}

}  // namespace qpn
