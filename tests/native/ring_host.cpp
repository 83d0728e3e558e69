// The library for cards over a CUDA that is not there: the ring as it is, and conversion by the
// device code in a loop, in the order of the stream.
#define QPN_ARCHITECTURES "90"
#include "../../csrc/launch/api.cu"
#include "../../csrc/launch/ring.cu"
#include "formats_host.h"

namespace qpn {

int write(const Card& card, const uint8_t* chunk, int64_t bytes, const Descriptor* table,
          int64_t count, cudaStream_t stream, Error* error) {
    std::vector<Piece> pieces(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)
        if (const int code = to_piece(table[i], i, card.layer, bytes, pieces[static_cast<size_t>(i)], error))
            return code;
    fake_stream(stream).enqueue([=] {
        settle_formats(card, pieces, chunk);
        for (const Piece& piece : pieces) {
            const Job job{piece, chunk + piece.offset, card.layer, card.tally};
            for (int64_t unit = 0; unit < units_of(piece); ++unit)
                convert_unit(job, static_cast<uint32_t>(unit));
        }
    });
    return kDone;
}

int finish(const Card& card, cudaStream_t stream, Error*) {
    fake_stream(stream).enqueue([=] {
        for (int number = 0; number < 2; ++number) {
            const Bank& bank = card.layer.bank[number];
            if (!closes(card.layer, bank)) continue;
            for (int64_t unit = 0; unit < bank.experts * bank.groups() * bank.n; ++unit)
                close_unit(card.layer, number, unit, card.tally);
        }
    });
    return kDone;
}

}  // namespace qpn

// Plans ask how much scratch the decode kernels want, and how many rows they take; nothing here
// launches them.
QPN_API int64_t qpn_cuda_moe_scratch(const int64_t*, int64_t, int64_t) { return 4096; }
QPN_API int64_t qpn_cuda_moe_most_rows(const int64_t*, int64_t, int64_t, int64_t) { return 1 << 16; }

// What a kernel would do with a chunk: read it, in the order of its stream.
QPN_API void qpn_test_use(const uint8_t* chunk, uint8_t* to, int64_t bytes) {
    cudaMemcpyAsync(to, chunk, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, nullptr);
}
QPN_API void qpn_test_wait(void) { cudaStreamSynchronize(nullptr); }

// Makes later calls of the fake CUDA fail; an empty name makes none fail.
QPN_API void qpn_test_fail(const char* name, long before, long times) {
    FakeFault& fault = fake_fault();
    std::lock_guard<std::mutex> hold(fault.mutex);
    fault.name = name;
    fault.before = before;
    fault.times = times;
}
