// Weights of a chunk of experts, for `legacy`: tiles of a bank as (experts, parts, columns, K)
// row-major numbers that matrix products take, and a factor for the sums of every column.
//
// Under fp16 the scales of a column are multiplied by a power of two that brings the largest just
// below the end of the range: scales 2^25 apart are then held, whatever their dtype. The factor
// takes it back. Globals of e2m1 are in the factor too, and never in a weight.
#pragma once
#include "numbers.cuh"
#include "qpn.cuh"

namespace qpn {

struct Dequantize {
    Bank bank;
    void* out;              // weights of the first expert's first tile
    float* factors;         // (experts, n)
    const int64_t* slots;   // (experts,) of this chunk
    const int32_t* counts;  // (experts,) rows of each; an expert without rows is left as it was
    int32_t first_tile, last_tile;
    int32_t sharing;  // warps that share the K of a tile: 1 or kDequantizeWarps
};

constexpr int kDequantizeWarps = 4;

// How a code becomes a weight. A fused weight is an fp16 number: bf16 takes it as two parts.
enum Making : int { kExact = 0, kFused = 1, kFloat4 = 2 };

QPN_BOTH constexpr int dequantized_parts(int making, int dtype) {
    return making == kFused && dtype == kBfloat16 ? 2 : 1;
}

// Metadata of four neighbouring columns in one group, as it is stored.
struct RawColumns {
    uint32_t r[4];
    uint32_t zeros;
};

// The same as numbers. `zero` is the bias where a weight is fused.
struct FourColumns {
    float scale[4], zero[4];
};

template <int kMaking>
QPN_DEVICE RawColumns load_columns(const Bank& bank, int64_t slot, int32_t group, int32_t column) {
    const int64_t at = (slot * bank.groups + group) * bank.np() + column;
    RawColumns raw{};
    if (kMaking == kFloat4 && bank.layout != kWide) {
        raw.r[0] = *reinterpret_cast<const uint32_t*>(bank.plane + at);
    } else if (kMaking == kFloat4 || bank.layout == kCompact) {
        const uint2 two = *reinterpret_cast<const uint2*>(bank.plane + at * 2);
        raw.r[0] = two.x, raw.r[1] = two.y;
        if (kMaking != kFloat4)
            raw.zeros = *reinterpret_cast<const uint16_t*>(bank.second + at / 2);
    } else if (bank.layout == kRecord) {
        const uint32_t* three = reinterpret_cast<const uint32_t*>(bank.plane + at * 3);
        raw.r[0] = three[0], raw.r[1] = three[1], raw.r[2] = three[2];
    } else {
        const uint4 four = *reinterpret_cast<const uint4*>(bank.plane + at * 4);
        raw.r[0] = four.x, raw.r[1] = four.y, raw.r[2] = four.z, raw.r[3] = four.w;
    }
    return raw;
}

QPN_DEVICE FourColumns decode_e4m3(const RawColumns& raw, const Bank& bank) {
    uint32_t low = raw.r[0], high = raw.r[1];
    if (bank.layout != kWide) e4m3_to_half2(raw.r[0], low, high);
    return FourColumns{{half_to_float(low), half_to_float(low >> 16), half_to_float(high),
                        half_to_float(high >> 16)},
                       {}};
}

template <int kMaking>
QPN_DEVICE FourColumns decode_columns(const RawColumns& raw, const Bank& bank) {
    if constexpr (kMaking == kFloat4) return decode_e4m3(raw, bank);
    const uint32_t (&r)[4] = raw.r;
    uint32_t bits[4] = {r[0] & 0xffffu, r[0] >> 16, r[1] & 0xffffu, r[1] >> 16};
    FourColumns of{};
    if (bank.layout == kCompact) {
#pragma unroll
        for (int c = 0; c < 4; ++c) of.zero[c] = float(raw.zeros >> (4 * c) & 0xfu);
    } else if (bank.layout == kRecord) {
        bits[1] = r[0] >> 24 | (r[1] & 0xffu) << 8;
        bits[2] = r[1] >> 16, bits[3] = r[2] >> 8 & 0xffffu;
        of.zero[0] = float(r[0] >> 16 & 0xffu), of.zero[1] = float(r[1] >> 8 & 0xffu);
        of.zero[2] = float(r[2] & 0xffu), of.zero[3] = float(r[2] >> 24);
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) bits[c] = r[c] & 0xffffu;
    }
    const bool bf16 = bank.layout == kCompact && bank.scale_dtype == kBf16;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        of.scale[c] = bf16 ? bf16_to_float(bits[c]) : half_to_float(bits[c]);
        if constexpr (kMaking == kFused) {
            // b = fp16(-z s)
            of.zero[c] = bank.layout == kWide
                             ? half_to_float(r[c] >> 16)
                             : half_to_float(float_to_half((0.0f - of.zero[c]) * of.scale[c]));
        } else if (bank.layout == kWide) {
            // A zero scale has lost its zero point, and needs none.
            of.zero[c] =
                of.scale[c] == 0.0f ? 0.0f : rintf(-half_to_float(r[c] >> 16) / of.scale[c]);
        }
    }
    return of;
}

// The power of two, as its exponent, that brings `most` between 2^11 and 2^12: times a code's 15
// that is within fp16. 0 where there is nothing to bring.
QPN_DEVICE int32_t exponent_for_half(float most) {
    const int32_t bits = int32_t(__float_as_uint(most) >> 23 & 0xffu);
    if (most == 0.0f || bits == 0xff) return 0;
    const int32_t up = 127 + 11 - bits;
    return up < 126 ? up : 126;
}

QPN_DEVICE float power_of_two(int32_t exponent) {
    return __uint_as_float(uint32_t(exponent + 127) << 23);
}

QPN_DEVICE uint32_t two_bf16(float low, float high) {
#if QPN_ARCH >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return float_to_bf16(low) | float_to_bf16(high) << 16;
#endif
}

// One column of a group, ready for its codes.
struct Making16 {
    uint32_t first, second;  // 1024 + z and scale doubled; fused: scale and bias; e2m1: scale
    float scale, zero;
};

template <int kOut, int kMaking>
QPN_DEVICE Making16 ready(float scale, float zero, int32_t exponent) {
    Making16 of{};
    of.scale = kOut == kFloat16 && kMaking != kFused ? scale * power_of_two(exponent) : scale;
    of.zero = zero;
    const uint32_t half = float_to_half(of.scale);
    of.second = half | half << 16;
    if (kMaking == kExact) {
        const uint32_t offset = float_to_half(1024.0f + zero);
        of.first = offset | offset << 16;
    } else if (kMaking == kFused) {
        const uint32_t bias = float_to_half(zero);
        of.first = bias | bias << 16;
    }
    return of;
}

// Rows 2i and 2i + 1 of a word: exact fp16 numbers, the code less its zero point, the fused weight,
// or e2m1.
template <int kMaking>
QPN_DEVICE uint32_t code_pair(uint32_t w, int i, const Making16& of) {
    if constexpr (kMaking == kFloat4) {
        const uint32_t part = w >> (4 * i);
        // Exponent and mantissa at bits 9 to 11 are the number times 2^-14.
        return half2_mul((part << 9 & 0x0e000e00u) | (part << 12 & 0x80008000u), 0x74007400u);
    } else {
        const uint32_t code = (w >> (4 * i) & 0x000f000fu) | 0x64006400u;
        if constexpr (kMaking == kExact) return half2_sub(code, of.first);
        return half2_fma(half2_sub(code, 0x64006400u), of.second, of.first);
    }
}

// As one instruction: the compiler makes four of an assignment here.
QPN_DEVICE void store_vector(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

QPN_DEVICE void store_floats(float* to, const float (&v)[8]) {
    store_vector(to, __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                 __float_as_uint(v[3]));
    store_vector(to + 4, __float_as_uint(v[4]), __float_as_uint(v[5]), __float_as_uint(v[6]),
                 __float_as_uint(v[7]));
}

QPN_DEVICE void half2_to_floats(uint32_t pair, float& low, float& high) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high)
        : "r"(pair));
}

// Eight weights as the sum of so many bf16 numbers each.
template <int kParts>
QPN_DEVICE void store_parts(uint16_t* to, int64_t next_part, float (&values)[8]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part, to += next_part) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = two_bf16(values[2 * i], values[2 * i + 1]);
            values[2 * i] -= bf16_to_float(pairs[i] & 0xffffu);
            values[2 * i + 1] -= bf16_to_float(pairs[i] >> 16);
        }
        store_vector(to, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

template <int kOut, int kMaking>
QPN_DEVICE void store_column(void* out, int64_t at, int64_t next_part, uint32_t w,
                             const Making16& of) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = code_pair<kMaking>(w, i, of);
    if constexpr (kOut == kFloat16) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (kMaking != kFused) pairs[i] = half2_mul(pairs[i], of.second);
        store_vector(static_cast<uint16_t*>(out) + at, pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
        float values[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            half2_to_floats(pairs[i], values[2 * i], values[2 * i + 1]);
            if (kMaking != kFused) values[2 * i] *= of.scale, values[2 * i + 1] *= of.scale;
        }
        if constexpr (kOut == kFloat32)
            store_floats(static_cast<float*>(out) + at, values);
        else
            store_parts<dequantized_parts(kMaking, kOut)>(static_cast<uint16_t*>(out) + at,
                                                          next_part, values);
    }
}

// The largest scale of each of a lane's four columns over all groups.
template <int kMaking>
QPN_DEVICE void largest_scales(float (&most)[4], const Bank& bank, int64_t slot, int32_t column,
                               int32_t sharing) {
    __shared__ float shared[kDequantizeWarps][kTile];
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t part = sharing > 1 ? warp : 0;
    for (int32_t g = part * 4 + lane / 8; g < bank.groups; g += 4 * sharing) {
        const FourColumns of =
            decode_columns<kMaking>(load_columns<kMaking>(bank, slot, g, column), bank);
#pragma unroll
        for (int c = 0; c < 4; ++c) most[c] = fmaxf(most[c], fabsf(of.scale[c]));
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        most[c] = fmaxf(most[c], __shfl_xor_sync(0xffffffffu, most[c], 8));
        most[c] = fmaxf(most[c], __shfl_xor_sync(0xffffffffu, most[c], 16));
    }
    if (sharing == 1) return;
    if (lane < 8)
        for (int c = 0; c < 4; ++c) shared[warp][lane * 4 + c] = most[c];
    __syncthreads();
    for (int w = 0; w < kDequantizeWarps; ++w)
        for (int c = 0; c < 4; ++c) most[c] = fmaxf(most[c], shared[w][lane % 8 * 4 + c]);
}

// What the sums of a column are multiplied by.
QPN_DEVICE float factor_of(const Bank& bank, int64_t slot, int32_t column, int32_t exponent) {
    const float back = power_of_two(-exponent);
    if (bank.sense == kNoGlobal || bank.layout == kWide) return back;
    const float* globals = reinterpret_cast<const float*>(bank.second);
    const float whole = globals[slot * bank.projections + (bank.projections == 2 ? column & 1 : 0)];
    return bank.sense == kDivisor ? back / whole : back * whole;
}

// Weight words are read once.
QPN_DEVICE uint4 load_once(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// A warp takes a tile, or shares it with its block: lane = four columns of one word row, so that
// loads are whole lines, and four lanes write 32 consecutive rows of a column.
template <int kOut, int kMaking>
QPN_DEVICE void dequantize_tiles(const Dequantize& call) {
    const Bank& bank = call.bank;
    if (call.counts[blockIdx.y] == 0) return;
    const int64_t slot = call.slots[blockIdx.y];
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool shared = call.sharing > 1;
    const int32_t tile =
        call.first_tile + (shared ? blockIdx.x : blockIdx.x * kDequantizeWarps + warp);
    if (tile >= call.last_tile) return;  // whole warps, and whole blocks where a barrier waits
    const int32_t column = tile * kTile + lane % 8 * 4;
    int32_t exponent[4] = {};
    if (kOut == kFloat16 && kMaking != kFused &&
        !(kMaking == kFloat4 && bank.layout == kCompact)) {  // e4m3 times e2m1 is held as it is
        float most[4] = {};
        largest_scales<kMaking>(most, bank, slot, column, call.sharing);
#pragma unroll
        for (int c = 0; c < 4; ++c) exponent[c] = exponent_for_half(most[c]);
    }
    const int32_t first_column = call.first_tile * kTile,
                  columns = min(call.last_tile * kTile, bank.n) - first_column;
    if (lane < 8 && (warp == 0 || !shared))
        for (int c = 0; c < 4; ++c)
            if (column + c < bank.n)
                call.factors[int64_t(blockIdx.y) * bank.n + column + c] =
                    factor_of(bank, slot, column + c, exponent[c]);
    const int64_t part_size = int64_t(columns) * bank.k;
    const int64_t origin = blockIdx.y * part_size * dequantized_parts(kMaking, kOut) +
                           int64_t(column - first_column) * bank.k;
    const uint4* words = reinterpret_cast<const uint4*>(bank.words + bank.tile_at(slot, tile));
    // Warps take neighbouring blocks of rows, so that lines are filled while they are in the cache.
    int32_t block = shared ? warp : 0, group = -1;
    const auto group_at = [&](int32_t at) { return bank.group_of(at * 2 + lane / 16); };
    // Words and metadata of the next block are under way while one is worked on.
    int32_t next_group = group_at(block);
    uint4 next = load_once(words + block * 32 + lane);
    RawColumns raw = load_columns<kMaking>(bank, slot, next_group, column);
    Making16 of[4] = {};
    while (block < bank.blocks) {
        const uint32_t w[4] = {next.x, next.y, next.z, next.w};
        const int32_t k = block * kBlockRows + lane / 8 * kRowsPerWord;
        if (next_group != group) {
            group = next_group;
            const FourColumns four = decode_columns<kMaking>(raw, bank);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                of[c] = ready<kOut, kMaking>(four.scale[c], four.zero[c], exponent[c]);
        }
        block += call.sharing;
        if (block < bank.blocks) {
            next = load_once(words + block * 32 + lane);
            next_group = group_at(block);
            if (next_group != group) raw = load_columns<kMaking>(bank, slot, next_group, column);
        }
        if (k >= bank.k) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (column + c < bank.n)
                store_column<kOut, kMaking>(call.out, origin + int64_t(c) * bank.k + k, part_size,
                                            w[c], of[c]);
    }
}

}  // namespace qpn
