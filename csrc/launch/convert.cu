// Conversion on a card: batches of pieces in the parameters of a kernel, so that a call allocates
// nothing and waits for nothing.
#include <cuda_runtime.h>

#include "convert.h"

namespace qpn {
namespace {

constexpr int kThreads = 256;
constexpr int kUnitsPerBlock = 4 * kThreads;
constexpr int kBatch = 76;

struct Batch {
    Card card;
    const uint8_t* chunk;
    int64_t count;
    Piece piece[kBatch];
};
static_assert(sizeof(Batch) <= 4096, "parameters of a kernel are at most 4 KiB on every card");

// The piece of this block: the last that begins at or before it.
__device__ __forceinline__ const Piece& piece_of_block(const Batch& batch) {
    int low = 0, high = static_cast<int>(batch.count) - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (batch.piece[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    return batch.piece[low];
}

// The units of this thread, one after the other.
template <class Do>
__device__ __forceinline__ void each_unit(const Piece& piece, const Do& act) {
    const uint32_t units = static_cast<uint32_t>(units_of(piece));
    const int64_t first = static_cast<int64_t>(blockIdx.x - piece.first_block) * kUnitsPerBlock;
    for (int64_t unit = first + threadIdx.x; unit < first + kUnitsPerBlock && unit < units;
         unit += kThreads)
        act(static_cast<uint32_t>(unit));
}

// Four blocks a processor: left to itself the compiler aims at five, and spills.
__global__ void __launch_bounds__(kThreads, 4) convert(const __grid_constant__ Batch batch) {
    const Piece& piece = piece_of_block(batch);
    const Job job{piece, batch.chunk + piece.offset, batch.card.layer, batch.card.tally};
    each_unit(piece, [&](uint32_t unit) { convert_unit(job, unit); });
}

__global__ void __launch_bounds__(kThreads) scan(const __grid_constant__ Batch batch) {
    __shared__ Found not_fp16, not_bf16;
    if (threadIdx.x == 0) not_fp16 = not_bf16 = Found{0, 0};
    __syncthreads();
    const Piece& piece = piece_of_block(batch);
    const Job job{piece, batch.chunk + piece.offset, batch.card.layer, batch.card.tally};
    each_unit(piece, [&](uint32_t unit) { scan_unit(job, unit, not_fp16, not_bf16); });
    __syncthreads();
    if (threadIdx.x == 0) tell(job, not_fp16, not_bf16);
}

__global__ void __launch_bounds__(kThreads) turn(const __grid_constant__ Card card, int number,
                                                 int64_t entries) {
    const Bank& bank = card.layer.bank[number];
    if (!turns(bank, card.tally, number)) return;
    for (int64_t entry = blockIdx.x * int64_t{kThreads} + threadIdx.x; entry < entries;
         entry += gridDim.x * int64_t{kThreads})
        turn_unit(bank, entry);
}

__global__ void mark_turned(Tally* tally) { turned(tally); }

__global__ void __launch_bounds__(kThreads) close(const __grid_constant__ Card card, int number,
                                                  int64_t units) {
    for (int64_t unit = blockIdx.x * int64_t{kThreads} + threadIdx.x; unit < units;
         unit += gridDim.x * int64_t{kThreads})
        close_unit(card.layer, number, unit, card.tally);
}

int launched(Error* error) {
    return failed(cudaGetLastError(), "the conversion could not be launched", error);
}

unsigned blocks_of(int64_t units) {
    const int64_t blocks = (units + kThreads - 1) / kThreads;
    return static_cast<unsigned>(blocks < 65536 ? blocks : 65536);
}

// Launches a kernel over some pieces of a chunk, in batches.
class Batches {
   public:
    using Kernel = void (*)(const Batch);

    Batches(Kernel kernel, const Card& card, const uint8_t* chunk, cudaStream_t stream,
            Error* error)
        : kernel_(kernel), stream_(stream), error_(error) {
        batch_.card = card;
        batch_.chunk = chunk;
        batch_.count = 0;
    }

    int add(Piece& piece) {
        const int64_t own = (units_of(piece) + kUnitsPerBlock - 1) / kUnitsPerBlock;
        if (batch_.count == kBatch || blocks_ + own > INT32_MAX)
            if (const int code = launch()) return code;
        piece.first_block = static_cast<uint32_t>(blocks_);
        batch_.piece[batch_.count++] = piece;
        blocks_ += own;
        return kDone;
    }

    int launch() {
        if (blocks_ == 0) return kDone;
        kernel_<<<static_cast<uint32_t>(blocks_), kThreads, 0, stream_>>>(batch_);
        batch_.count = blocks_ = 0;
        return launched(error_);
    }

   private:
    const Kernel kernel_;
    const cudaStream_t stream_;
    Error* const error_;
    Batch batch_;
    int64_t blocks_ = 0;
};

// Brings the planes into the format that the scales of a chunk need.
int turn_planes(const Card& card, cudaStream_t stream, Error* error) {
    for (int number = 0; number < 2; ++number) {
        const Bank& bank = card.layer.bank[number];
        if (bank.kind != kInt4 || bank.scale_dtype != kF16) continue;
        const int64_t entries = bank.experts * bank.plane();
        turn<<<blocks_of(entries), kThreads, 0, stream>>>(card, number, entries);
        if (const int code = launched(error)) return code;
    }
    mark_turned<<<1, 1, 0, stream>>>(card.tally);
    return launched(error);
}

}  // namespace

int write(const Card& card, const uint8_t* chunk, int64_t chunk_bytes, const Descriptor* table,
          int64_t count, cudaStream_t stream, Error* error) {
    Piece piece;
    bool wide = false;
    for (int64_t i = 0; i < count; ++i) {  // all of them before the first write
        if (const int code = to_piece(table[i], i, card.layer, chunk_bytes, piece, error)) return code;
        wide = wide || has_wide_scales(piece);
    }
    if (wide && !card.layer.checks_fp16()) {
        Batches scans(scan, card, chunk, stream, error);
        for (int64_t i = 0; i < count; ++i) {
            to_piece(table[i], i, card.layer, chunk_bytes, piece, error);
            if (!has_wide_scales(piece)) continue;
            if (const int code = scans.add(piece)) return code;
        }
        if (const int code = scans.launch()) return code;
        if (const int code = turn_planes(card, stream, error)) return code;
    }
    Batches conversions(convert, card, chunk, stream, error);
    for (int64_t i = 0; i < count; ++i) {
        to_piece(table[i], i, card.layer, chunk_bytes, piece, error);
        if (const int code = conversions.add(piece)) return code;
    }
    return conversions.launch();
}

int finish(const Card& card, cudaStream_t stream, Error* error) {
    for (int number = 0; number < 2; ++number) {
        const Bank& bank = card.layer.bank[number];
        if (!closes(card.layer, bank)) continue;
        const int64_t units = bank.experts * bank.groups() * bank.n;
        close<<<blocks_of(units), kThreads, 0, stream>>>(card, number, units);
        if (const int code =
                failed(cudaGetLastError(), "the closing pass could not be launched", error))
            return code;
    }
    return kDone;
}

}  // namespace qpn
