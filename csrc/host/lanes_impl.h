// Vectors of bank columns, as wide as the instruction set of the including file.
#pragma once
#include <math.h>
#include <string.h>

#include "../device/floats.cuh"
#include "tiles.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace qpn {
namespace {

#ifdef __AVX512F__
constexpr int kColumns = 16;
#else
constexpr int kColumns = 8;
#endif
constexpr int kVectors = kTile / kColumns;

typedef uint32_t Words __attribute__((vector_size(4 * kColumns)));
typedef int32_t Ints __attribute__((vector_size(4 * kColumns)));
typedef float Floats __attribute__((vector_size(4 * kColumns)));

template <class Vector>
inline Vector load(const void* at) {
    Vector v;
    memcpy(&v, at, sizeof v);
    return v;
}

template <class Vector>
inline void store(void* at, Vector v) {
    memcpy(at, &v, sizeof v);
}

inline Floats all(float value) { return Floats{} + value; }

inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline Floats rounded_to_half(Floats v) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kColumns; ++i) v[i] = from_half(to_half(v[i]));
    return v;
#endif
}

// First and last k8 of a group; the last group takes the pad rows.
inline void span(const Bank& bank, int64_t group, int64_t& first, int64_t& last) {
    first = group == 0 ? 0 : (group * bank.group - bank.phase) / kRowsPerWord;
    last = group + 1 == bank.groups() ? bank.k8()
                                      : ((group + 1) * bank.group - bank.phase) / kRowsPerWord;
}

inline const uint32_t* tile_of(const Bank& bank, int64_t slot, int64_t tile) {
    return reinterpret_cast<const uint32_t*>(bank.tensor[0]) + slot * bank.expert_words() +
           tile * bank.tile_words();
}

}  // namespace
}  // namespace qpn
