// A call's numbers, checked and brought into the form that kernels take. Plain C++, no CUDA.
#pragma once
#include <stddef.h>

#include "../device/convert.cuh"
#include "../host/check.h"
#include "../host/error.h"

namespace qpn {

// A layer on a card, and the table that counts what is wrong in it.
struct Card {
    Layer layer;
    Tally* tally;
};

constexpr int kLayerNumbers = 21;  // LayerSpec.to_ints of loader/bank.py

// `state` holds the table, then the globals that wait for the closing pass.
inline int read_card(const int64_t* numbers, void* const* tensors, const int64_t* bytes,
                     int64_t count, uint8_t* state, int64_t state_bytes, Card& card, Error* error) {
    Layer& layer = card.layer;
    layer.fused_bias = numbers[0] != 0;
    int64_t next = 0;
    for (int b = 0; b < 2; ++b) {
        Bank& bank = layer.bank[b];
        memcpy(&bank, numbers + 1 + 10 * b, 10 * sizeof(int64_t));
        memset(bank.tensor, 0, sizeof bank.tensor);
        for (int t = 0; t < bank.tensors(); ++t, ++next) {
            if (next >= count) return refuse("the tensors are not those of the layer", -1, error);
            bank.tensor[t] = static_cast<uint8_t*>(tensors[next]);
            bank.bytes[t] = bytes[next];
        }
    }
    if (next != count) return refuse("the tensors are not those of the layer", -1, error);
    layer.cache = nullptr;
    layer.cache_bytes = 0;
    const std::string wrong = check_layer(layer, false);
    if (!wrong.empty()) return refuse(wrong.c_str(), -1, error);
    for (const Bank& bank : layer.bank)
        for (int t = 0; t < bank.tensors(); ++t)
            if (reinterpret_cast<uintptr_t>(bank.tensor[t]) % 8)
                return refuse("a bank tensor does not start on an 8-byte boundary", -1, error);
    const int64_t experts = layer.bank[1].experts;  // W2 is always there
    const int64_t used = tally_bytes(experts);
    const bool waits = layer.bank[1].kind == kE2m1 && layer.bank[1].layout == kWide;
    if (state == nullptr || reinterpret_cast<uintptr_t>(state) % 8 ||
        state_bytes < used + (waits ? experts * 12 : 0))
        return refuse("the conversion cache is smaller than the layer needs", -1, error);
    card.tally = reinterpret_cast<Tally*>(state);
    layer.cache = reinterpret_cast<float*>(state + used);
    layer.cache_bytes = state_bytes - used;
    return kDone;
}

inline int to_piece(const Descriptor& from, int64_t subject, const Layer& layer, int64_t chunk_bytes,
                    Piece& piece, Error* error) {
    const std::string wrong = check_descriptor(from, layer, chunk_bytes);
    if (!wrong.empty()) return refuse(wrong.c_str(), subject, error);
    constexpr int64_t most = INT32_MAX;
    if (from.rows > most || from.cols > most) return refuse("a piece is too large", subject, error);
    if (from.expect_a > most || from.expect_b > most || from.expect_a < -1 || from.expect_b < -1)
        return refuse("an expected number is no size", subject, error);
    piece.offset = from.offset + from.skip;
    piece.row_bytes = from.row_bytes;
    piece.rows = static_cast<int32_t>(from.rows);
    piece.cols = static_cast<int32_t>(from.cols);
    piece.dest_row = static_cast<int32_t>(from.dest_row);
    piece.slot = static_cast<int32_t>(from.slot);
    piece.expect_a = static_cast<int32_t>(from.expect_a);
    piece.expect_b = static_cast<int32_t>(from.expect_b);
    piece.role = static_cast<uint8_t>(from.role);
    piece.bank = static_cast<uint8_t>(from.bank);
    piece.projection = static_cast<uint8_t>(from.projection);
    piece.reserved = 0;
    piece.first_block = 0;
    if (units_of(piece) > INT64_C(0xffffffff)) return refuse("a piece is too large", subject, error);
    return kDone;
}

}  // namespace qpn
