// The kernels for SM70, as one unit without a standard header: NVRTC 12.8 makes a cubin of it. A
// build by nvcc 12.x takes the same device code by csrc/launch instead (docs/build.md).
#include "../device/dequantize.cuh"
#include "../device/legacy.cuh"
#include "../device/quadpair.cuh"

#define QPN_RTC extern "C" __global__ void __launch_bounds__(256, 2)

QPN_RTC qpn_sm70_int4_w13(const __grid_constant__ qpn::Step step) {
    qpn::quad_passes<false, false, 8, true>(step);
}
QPN_RTC qpn_sm70_int4_w2(const __grid_constant__ qpn::Step step) {
    qpn::quad_passes<false, false, 8, false>(step);
}
QPN_RTC qpn_sm70_fused_w13(const __grid_constant__ qpn::Step step) {
    qpn::quad_passes<false, true, 8, true>(step);
}
QPN_RTC qpn_sm70_fused_w2(const __grid_constant__ qpn::Step step) {
    qpn::quad_passes<false, true, 8, false>(step);
}
QPN_RTC qpn_sm70_e2m1_w13(const __grid_constant__ qpn::Step step) {
    qpn::quad_passes<true, false, 8, true>(step);
}
QPN_RTC qpn_sm70_e2m1_w2(const __grid_constant__ qpn::Step step) {
    qpn::quad_passes<true, false, 8, false>(step);
}
QPN_RTC qpn_sm70_sum(const __grid_constant__ qpn::Step step) { qpn::sum_rows<qpn::Half>(step); }
QPN_RTC qpn_sm70_dequantize(const __grid_constant__ qpn::Dequantize call) {
    qpn::dequantize_tiles<qpn::kFloat16, qpn::kExact>(call);
}
QPN_RTC qpn_sm70_dequantize_fused(const __grid_constant__ qpn::Dequantize call) {
    qpn::dequantize_tiles<qpn::kFloat16, qpn::kFused>(call);
}
QPN_RTC qpn_sm70_dequantize_e2m1(const __grid_constant__ qpn::Dequantize call) {
    qpn::dequantize_tiles<qpn::kFloat16, qpn::kFloat4>(call);
}
QPN_RTC qpn_sm70_legacy_keys(const __grid_constant__ qpn::LegacyStep step) {
    qpn::legacy_keys(step);
}
QPN_RTC qpn_sm70_legacy_inner(const __grid_constant__ qpn::LegacyStep step,
                              const __grid_constant__ qpn::LegacyChunk chunk) {
    qpn::legacy_inner<qpn::kFloat16, 4>(step, chunk);
}
