// The C interface that loader/cuda_core.py calls for loading. Raw pointers come with their
// capacities, and a stream; nothing here knows of Python or PyTorch.
#include <cuda_runtime.h>

#include <memory>

#include "../host/error.h"
#include "convert.h"
#include "ring.h"

#define QPN_API extern "C" __attribute__((visibility("default")))

namespace {

// Calls come from threads with another card in hand; each leaves it as it found it.
class OnCard {
   public:
    explicit OnCard(int device) {
        if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
        code_ = cudaSetDevice(device);
    }
    ~OnCard() { cudaSetDevice(before_); }
    cudaError_t code() const { return code_; }

   private:
    int before_ = 0;
    cudaError_t code_;
};

int on_card(const OnCard& card, qpn::Error* error) {
    return qpn::failed(card.code(), "the card cannot be used", error);
}

}  // namespace

// Raised with every change of a call, of its structs or of what their numbers mean.
QPN_API int qpn_interface(void) { return 1; }

// What it was built for: "80 90" are images, "90+" is one that newer cards can translate.
QPN_API const char* qpn_architectures(void) { return QPN_ARCHITECTURES; }

QPN_API int qpn_cuda_version(void) { return CUDART_VERSION; }

// Converts pieces of a chunk that lies on the card. Returns when it is enqueued on `stream`.
QPN_API int qpn_card_write(int device, void* stream, const uint8_t* chunk, int64_t chunk_bytes,
                           const int64_t* descriptors, int64_t pieces, const int64_t* layer_numbers,
                           void* const* tensors, const int64_t* tensor_bytes, int64_t tensor_count,
                           uint8_t* state, int64_t state_bytes, qpn::Error* error) try {
    qpn::Card card;
    if (const int code = qpn::read_card(layer_numbers, tensors, tensor_bytes, tensor_count, state,
                                        state_bytes, card, error))
        return code;
    const OnCard here(device);
    if (const int code = on_card(here, error)) return code;
    return qpn::write(card, chunk, chunk_bytes,
                      reinterpret_cast<const qpn::Descriptor*>(descriptors), pieces,
                      static_cast<cudaStream_t>(stream), error);
} catch (...) {
    return qpn::caught(error);
}

QPN_API int qpn_card_finish(int device, void* stream, const int64_t* layer_numbers,
                            void* const* tensors, const int64_t* tensor_bytes, int64_t tensor_count,
                            uint8_t* state, int64_t state_bytes, qpn::Error* error) try {
    qpn::Card card;
    if (const int code = qpn::read_card(layer_numbers, tensors, tensor_bytes, tensor_count, state,
                                        state_bytes, card, error))
        return code;
    const OnCard here(device);
    if (const int code = on_card(here, error)) return code;
    return qpn::finish(card, static_cast<cudaStream_t>(stream), error);
} catch (...) {
    return qpn::caught(error);
}

// Pins host memory that the caller owns, page by page, so that not a byte more is pinned.
QPN_API int qpn_pin(int device, void* memory, int64_t bytes, qpn::Error* error) {
    const OnCard here(device);
    if (const int code = on_card(here, error)) return code;
    const cudaError_t code = cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable);
    if (code != cudaSuccess) cudaGetLastError();  // a refusal is no fault of what comes next
    return qpn::failed(code, "host memory could not be pinned", error);
}

QPN_API int qpn_unpin(void* memory, qpn::Error* error) {
    return qpn::failed(cudaHostUnregister(memory), "host memory could not be unpinned", error);
}

QPN_API int qpn_ring_open(int device, uint8_t* slots, int64_t slot_bytes, int64_t slot_count,
                          int threads, int chunks, void** ring, qpn::Error* error) try {
    const OnCard here(device);
    auto made = std::make_unique<qpn::Ring>();
    if (const int code =
            made->open(device, {slots, slot_bytes, slot_count}, threads, chunks, error))
        return code;
    *ring = made.release();
    return qpn::kDone;
} catch (...) {
    return qpn::caught(error);
}

// `reads` are rows of (file descriptor, offset in the file, length, offset in the chunk); the chunk
// is `bytes` at `memory` on the card.
QPN_API int qpn_ring_submit(void* ring, int chunk, uint8_t* memory, int64_t bytes,
                            const int64_t* reads, int64_t count, qpn::Error* error) try {
    std::vector<qpn::Read> table;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t* row = reads + 4 * i;
        if (row[1] < 0 || row[2] < 1 || row[3] < 0 || row[2] > bytes || row[3] > bytes - row[2])
            return qpn::refuse("a read reaches outside the chunk", i, error);
        table.push_back({static_cast<int>(row[0]), row[1], row[2], memory + row[3]});
    }
    return static_cast<qpn::Ring*>(ring)->submit(chunk, table.data(), count, error);
} catch (...) {
    return qpn::caught(error);
}

QPN_API int qpn_ring_arrive(void* ring, int chunk, void* stream, qpn::Error* error) try {
    return static_cast<qpn::Ring*>(ring)->arrive(chunk, static_cast<cudaStream_t>(stream), error);
} catch (...) {
    return qpn::caught(error);
}

QPN_API int qpn_ring_release(void* ring, int chunk, void* stream, qpn::Error* error) try {
    return static_cast<qpn::Ring*>(ring)->release(chunk, static_cast<cudaStream_t>(stream), error);
} catch (...) {
    return qpn::caught(error);
}

QPN_API void qpn_ring_close(void* ring) {
    int before = 0;
    const bool known = cudaGetDevice(&before) == cudaSuccess;
    delete static_cast<qpn::Ring*>(ring);
    if (known) cudaSetDevice(before);
}
