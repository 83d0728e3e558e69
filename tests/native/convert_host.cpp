// The device converter compiled by g++ behind the C interface of the card's library, for tests:
// every unit in a loop, in a shuffled order, since a card runs them in any.
#include <vector>

#include "formats_host.h"

extern "C" int qpn_test_write(const uint8_t* chunk, int64_t bytes, const int64_t* descriptors,
                              int64_t count, const int64_t* numbers, void* const* tensors,
                              const int64_t* tensor_bytes, int64_t tensor_count, uint8_t* state,
                              int64_t state_bytes, qpn::Error* error) {
    qpn::Card card;
    const auto* table = reinterpret_cast<const qpn::Descriptor*>(descriptors);
    if (const int code = qpn::read_card(numbers, tensors, tensor_bytes, tensor_count, state, state_bytes, card, error))
        return code;
    std::vector<qpn::Piece> pieces(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)
        if (const int code = qpn::to_piece(table[i], i, card.layer, bytes, pieces[static_cast<size_t>(i)], error))
            return code;
    qpn::settle_formats(card, pieces, chunk);
    for (const qpn::Piece& piece : pieces) {
        const uint64_t units = static_cast<uint64_t>(qpn::units_of(piece));
        uint64_t step = units / 2 + 1;
        while (units % step == 0 && step > 1) --step;
        const qpn::Job job{piece, chunk + piece.offset, card.layer, card.tally};
        std::vector<bool> done(units);
        for (uint64_t n = 0, unit = 0; n < units; ++n, unit = (unit + step) % units) {
            while (done[unit]) unit = (unit + 1) % units;
            done[unit] = true;
            qpn::convert_unit(job, static_cast<uint32_t>(unit));
        }
    }
    return 0;
}

extern "C" int qpn_test_finish(const int64_t* numbers, void* const* tensors,
                               const int64_t* tensor_bytes, int64_t tensor_count, uint8_t* state,
                               int64_t state_bytes, qpn::Error* error) {
    qpn::Card card;
    if (const int code = qpn::read_card(numbers, tensors, tensor_bytes, tensor_count, state, state_bytes, card, error))
        return code;
    for (int64_t number = 0; number < 2; ++number) {
        const qpn::Bank& bank = card.layer.bank[number];
        if (!qpn::closes(card.layer, bank)) continue;
        for (int64_t unit = 0; unit < bank.experts * bank.groups() * bank.n; ++unit)
            qpn::close_unit(card.layer, number, unit, card.tally);
    }
    return 0;
}
