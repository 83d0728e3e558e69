// What differs between the compilers of the device code: nvcc, NVRTC and g++ (index maths only).
#pragma once

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define QPN_DEVICE __device__ __forceinline__
#define QPN_BOTH __host__ __device__ __forceinline__
#else
#define QPN_DEVICE inline
#define QPN_BOTH inline
#endif

#if defined(__CUDA_ARCH__)
#define QPN_ARCH __CUDA_ARCH__
#else
#define QPN_ARCH 0
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
namespace qpn {
// Keeps a number in its register: the compiler would rather work it out again in every turn of a
// loop.
QPN_DEVICE uint32_t pinned(uint32_t value) {
    asm volatile("mov.u32 %0, %0;" : "+r"(value));
    return value;
}
// The same for a constant of all lanes, which would else stand in every instruction.
QPN_DEVICE uint32_t pinned_constant(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }
}  // namespace qpn
#endif
