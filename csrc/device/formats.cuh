// int4 scales that arrive in 32 bits and are kept in 16: which format holds them all, found on the
// card. A bank begins in fp16. At the first scale that fp16 does not hold exactly, what is there is
// rewritten as bf16 in place, and so is what comes after. Three launches in the order of a stream:
// `scan_unit` over the scales of a chunk, `turn_unit` over the planes, then the conversion.
#pragma once
#include "planes.cuh"

namespace qpn {
inline namespace conversion {

QPN_BOTH bool has_wide_scales(const Piece& piece) {
    return piece.role == kScalesGn32 || piece.role == kScalesNg32;
}

// What a launch over one piece found of one kind; in shared memory on a card.
struct Found {
    unsigned long long count, rank;
    QPN_BOTH void add(unsigned long long at) {
#ifdef __CUDA_ARCH__
        atomicAdd(&count, 1ull);
        atomicMax(&rank, at);
#else
        ++count;
        if (at > rank) rank = at;
#endif
    }
};

// One scale: whether fp16 and bf16 hold it. Any other finding is the conversion's.
QPN_BOTH void scan_unit(const Job& job, uint32_t unit, Found& not_fp16, Found& not_bf16) {
    const WideScale one = wide_scale(job, unit);
    if (!finite(one.value)) return;
    const unsigned long long rank = rank_of(one.group, one.column);
    if (from_half(to_half(one.value)) != one.value) not_fp16.add(rank);
    if (from_bf16(to_bf16(one.value)) != one.value) not_bf16.add(rank);
}

// Where the value of a rank lies in the piece again.
QPN_BOTH int64_t bits_at(const Job& job, unsigned long long rank) {
    const int64_t group = static_cast<int64_t>(~rank >> 32);
    const int64_t column = static_cast<int64_t>(~rank & 0xffffffffu);
    const bool by_column = job.piece.role == kScalesNg32;
    const int64_t r = (by_column ? column : group) - job.piece.dest_row;
    const int64_t c = by_column ? group : column;
    return static_cast<int32_t>(load32(job.row(r) + c * 4));
}

// What one block found of its piece; one thread says it.
QPN_BOTH void tell(const Job& job, const Found& not_fp16, const Found& not_bf16) {
    if (not_fp16.count) {
        job.wrong_first(kNotFp16, not_fp16.count, not_fp16.rank, bits_at(job, not_fp16.rank));
        int* format = &job.tally->format[job.piece.bank];
#ifdef __CUDA_ARCH__
        atomicMax(format, int(kTurning));
#else
        if (*format < kTurning) *format = kTurning;
#endif
    }
    if (not_bf16.count)
        job.wrong_first(kNotBf16, not_bf16.count, not_bf16.rank, bits_at(job, not_bf16.rank));
}

// Whether the plane of a bank has to be rewritten now.
QPN_BOTH bool turns(const Bank& bank, const Tally* tally, int number) {
    return bank.kind == kInt4 && bank.scale_dtype == kF16 && tally->format[number] == kTurning;
}

// One entry of a plane that turns: what fp16 and bf16 both hold; anything else is an error by now.
QPN_BOTH void turn_unit(const Bank& bank, int64_t entry) {
    uint16_t* at = reinterpret_cast<uint16_t*>(bank.tensor[1]) + entry;
    *at = to_bf16(from_half(*at));
}

// After `turn_unit` of every entry.
QPN_BOTH void turned(Tally* tally) {
    for (int bank = 0; bank < 2; ++bank)
        if (tally->format[bank] == kTurning) tally->format[bank] = kInBf16;
}

}  // namespace conversion
}  // namespace qpn
