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
template <int kBytes>
QPN_DEVICE void write_blank(uint32_t at) {
    if constexpr (kBytes == 16)
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at), "r"(0) : "memory");
    else if constexpr (kBytes == 8)
        asm volatile("st.shared.v2.u32 [%0], {%1,%1};" ::"r"(at), "r"(0) : "memory");
    else
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(0) : "memory");
}
QPN_DEVICE void write_word(uint32_t at, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
QPN_DEVICE float read_float(uint32_t at) { return __uint_as_float(read_word(at)); }

// Blocks of one cluster: they run together and reach each other's shared memory.
QPN_DEVICE uint32_t cluster_rank() {
    uint32_t rank = 0;
#if QPN_ARCH >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
QPN_DEVICE uint32_t cluster_size() {
    uint32_t size = 1;
#if QPN_ARCH >= 900
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return size;
}
QPN_DEVICE void cluster_arrive() {
#if QPN_ARCH >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
QPN_DEVICE void cluster_wait() {
#if QPN_ARCH >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Four floats into the shared memory of a block of the cluster, at an address of this block.
QPN_DEVICE void write_floats_to(uint32_t rank, uint32_t at, float a, float b, float c, float d) {
#if QPN_ARCH >= 900
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(there), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
#else
    write_floats(at, a, b, c, d);
#endif
}

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
