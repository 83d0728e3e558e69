// Loads by what they are for, and the order between dependent launches.
#pragma once
#include "macros.cuh"

namespace qpn {

struct Vector {
    uint32_t x, y, z, w;
};

QPN_DEVICE uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Copies to shared memory run beside the products and hold no register until they are used.
template <int kBytes>
QPN_DEVICE void copy_async(uint32_t to, const void* from) {
#if QPN_ARCH >= 800
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else if constexpr (kBytes == 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#endif
}
// The same, or zeros where `valid` is false.
template <int kBytes>
QPN_DEVICE void copy_or_zero(uint32_t to, const void* from, bool valid) {
#if QPN_ARCH >= 800
    const int bytes = valid ? kBytes : 0;
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(bytes)
                     : "memory");
    else if constexpr (kBytes == 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
#endif
}
QPN_DEVICE void close_copies() {
#if QPN_ARCH >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `kOpen` of this lane's closed groups are under way.
template <int kOpen>
QPN_DEVICE void wait_for_copies() {
#if QPN_ARCH >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
#endif
}

QPN_DEVICE Vector read_vector(uint32_t at) {
    Vector v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
QPN_DEVICE uint32_t read_word(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
QPN_DEVICE void read_pair(uint32_t at, uint32_t& a, uint32_t& b) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at) : "memory");
}

QPN_DEVICE void write_vector(uint32_t at, const Vector& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
QPN_DEVICE void write_floats(uint32_t at, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
QPN_DEVICE void write_pair(uint32_t at, uint32_t a, uint32_t b) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
QPN_DEVICE void write_word(uint32_t at, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
QPN_DEVICE float read_float(uint32_t at) { return __uint_as_float(read_word(at)); }

// Weight words read straight into a register, past the first cache.
QPN_DEVICE uint32_t load_word(const uint32_t* at) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

// Activations may come from the launch before, which may still run when this one starts: never by
// the read-only path, and never before `wait_for_launch_before`.
QPN_DEVICE Vector load_activations(const uint16_t* at) {
    Vector v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

QPN_DEVICE void wait_for_launch_before() {
#if QPN_ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
QPN_DEVICE void let_next_launch_start() {
#if QPN_ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks the second cache for a line ahead of its use.
QPN_DEVICE void prefetch_line(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

}  // namespace qpn
