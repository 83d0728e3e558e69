// Barriers in shared memory, and the copies that arrive at them. From SM90 on a barrier also counts
// bytes, and one lane copies for a whole warp.
#pragma once
#include "access.cuh"

namespace qpn {

QPN_DEVICE void open_barrier(uint32_t barrier, uint32_t arrivals) {
#if QPN_ARCH >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// After opening, before the block's next barrier: copies by one lane meet the barriers too.
QPN_DEVICE void show_barriers() {
#if QPN_ARCH >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

QPN_DEVICE void arrive_at(uint32_t barrier) {
#if QPN_ARCH >= 800
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier)
                 : "memory");
#endif
}

// This lane's copies so far arrive when they are there.
QPN_DEVICE void copies_arrive(uint32_t barrier) {
#if QPN_ARCH >= 800
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Waits for the end of the phase of this parity.
QPN_DEVICE void wait_at(uint32_t barrier, uint32_t parity) {
#if QPN_ARCH >= 900
    asm volatile(
        "{.reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#elif QPN_ARCH >= 800
    asm volatile(
        "{.reg .pred p;\n"
        "again: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
        "@!p bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// Some of a block's warps wait for each other; number 0 is that of the whole block.
QPN_DEVICE void sync_warps(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The next two are for one lane, SM90: `bytes` is a multiple of 16, and both addresses are.
QPN_DEVICE void expect_bytes(uint32_t barrier, uint32_t bytes) {
#if QPN_ARCH >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}
QPN_DEVICE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
#if QPN_ARCH >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
#endif
}
// Bulk copies by this lane see what it has seen written.
QPN_DEVICE void fence_bulk() {
#if QPN_ARCH >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

}  // namespace qpn
