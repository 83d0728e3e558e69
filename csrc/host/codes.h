// The inner loops of code conversion, once for each instruction set (codes_*.cpp).
//
// Sources are blocks of rows in a cache-sized buffer; destinations are bank words. `pair` blocks
// bring gate and up together, so that every 128-byte line is written once and whole.
#pragma once
#include <stdint.h>

namespace qpn {

struct CodesBlock {
    const uint8_t* first;   // gate, or the only source
    const uint8_t* second;  // up, or null
    int64_t row_bytes;      // from one source row to the next, in both
    int64_t rows;           // KN: rows of K; NK: rows of N (of one projection)
    int64_t words;          // 32-bit words used of each row
    uint32_t* dest;         // words of one expert
    int64_t tile_words;     // words from one tile to the next
    int64_t row0;           // KN: first k8; NK: first column of the projection (a multiple of 16)
    int projections;        // 2 where columns of gate and up alternate
    int parity;             // which of the two `first` is, where there is no `second`
};

struct CodesKernels {
    const char* name;
    void (*kn)(const CodesBlock&);
    void (*nk)(const CodesBlock&);
};

extern const CodesKernels kCodesPortable;
#ifdef QPN_X86
extern const CodesKernels kCodesAvx2;
extern const CodesKernels kCodesAvx512;
#endif

}  // namespace qpn
