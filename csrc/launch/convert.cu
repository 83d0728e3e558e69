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

__global__ void __launch_bounds__(kThreads) convert(const __grid_constant__ Batch batch) {
    int low = 0, high = static_cast<int>(batch.count) - 1;
    while (low < high) {  // the last piece that begins at or before this block
        const int middle = (low + high + 1) / 2;
        if (batch.piece[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    const Piece& piece = batch.piece[low];
    const Job job{piece, batch.chunk + piece.offset, batch.card.layer, batch.card.spots};
    const uint32_t units = static_cast<uint32_t>(units_of(piece));
    const int64_t first = static_cast<int64_t>(blockIdx.x - piece.first_block) * kUnitsPerBlock;
    for (int64_t unit = first + threadIdx.x; unit < first + kUnitsPerBlock && unit < units;
         unit += kThreads)
        convert_unit(job, static_cast<uint32_t>(unit));
}

__global__ void __launch_bounds__(kThreads) close(const __grid_constant__ Card card, int number,
                                                  int64_t units) {
    for (int64_t unit = blockIdx.x * int64_t{kThreads} + threadIdx.x; unit < units;
         unit += gridDim.x * int64_t{kThreads})
        close_unit(card.layer, number, unit, card.spots);
}

int launch(Batch& batch, uint32_t blocks, cudaStream_t stream, Error* error) {
    if (blocks == 0) return kDone;
    convert<<<blocks, kThreads, 0, stream>>>(batch);
    return failed(cudaGetLastError(), "the conversion could not be launched", error);
}

}  // namespace

int write(const Card& card, const uint8_t* chunk, int64_t chunk_bytes, const Descriptor* table,
          int64_t count, cudaStream_t stream, Error* error) {
    Piece piece;
    for (int64_t i = 0; i < count; ++i)  // all of them before the first write
        if (const int code = to_piece(table[i], i, card.layer, chunk_bytes, piece, error)) return code;
    Batch batch;
    batch.card = card;
    batch.chunk = chunk;
    batch.count = 0;
    int64_t blocks = 0;
    for (int64_t i = 0; i < count; ++i) {
        to_piece(table[i], i, card.layer, chunk_bytes, piece, error);
        const int64_t own = (units_of(piece) + kUnitsPerBlock - 1) / kUnitsPerBlock;
        if (batch.count == kBatch || blocks + own > INT32_MAX) {
            const int code = launch(batch, static_cast<uint32_t>(blocks), stream, error);
            if (code) return code;
            batch.count = blocks = 0;
        }
        piece.first_block = static_cast<uint32_t>(blocks);
        batch.piece[batch.count++] = piece;
        blocks += own;
    }
    return launch(batch, static_cast<uint32_t>(blocks), stream, error);
}

int finish(const Card& card, cudaStream_t stream, Error* error) {
    for (int number = 0; number < 2; ++number) {
        const Bank& bank = card.layer.bank[number];
        if (!closes(card.layer, bank)) continue;
        const int64_t units = bank.experts * bank.groups() * bank.n;
        const int64_t blocks = (units + kThreads - 1) / kThreads;
        close<<<static_cast<uint32_t>(blocks < 65536 ? blocks : 65536), kThreads, 0, stream>>>(
            card, number, units);
        if (const int code =
                failed(cudaGetLastError(), "the closing pass could not be launched", error))
            return code;
    }
    return kDone;
}

}  // namespace qpn
