// Source bytes of one chunk into bank words and metadata, in place, one unit of work at a time.
//
// Units of one piece write bytes of their own, in any order, so a card runs them all at once and
// g++ in a loop. Nothing is parked as on the host: where two tensors share a byte of zero points,
// each sets its own nibble.
#pragma once
#include "finish.cuh"
#include "formats.cuh"
#include "words.cuh"

namespace qpn {
inline namespace conversion {

QPN_BOTH void check_shape(const Job& job) {
    for (int i = 0; i < 2; ++i) {
        const int64_t value = load64(job.source + 8 * i);
        if (value != (i == 0 ? job.piece.expect_a : job.piece.expect_b))
            job.wrong(kShape, 0, i, value);
    }
}

QPN_BOTH void check_groups(const Job& job) {
    bool unset = true;
    for (int32_t i = 0; unset && i < job.piece.cols; ++i)
        unset = load32(job.source + INT64_C(4) * i) == 0xffffffffu;
    for (int32_t i = 0; !unset && i < job.piece.cols; ++i) {
        const int32_t value = static_cast<int32_t>(load32(job.source + INT64_C(4) * i));
        if (value != i / job.piece.expect_a) job.wrong(kGroups, 0, i, value);
    }
}

// Along which the units of a role run fastest: what neighbouring units read or write together.
QPN_BOTH int64_t fast_units(const Piece& piece) {
    switch (piece.role) {
        case kCodesKn:
        case kCodesNk:
        case kZerosGn: return piece.cols / 8;
        case kScalesNg:
        case kScalesNg8:
        case kScalesNg32:
        case kZerosNg: return piece.rows;
        case kScalesGn:
        case kScalesGn32:
        case kPlainNk: return piece.cols;
        default: return 1;
    }
}

QPN_BOTH int64_t units_of(const Piece& piece) {
    switch (piece.role) {
        case kCodesKn:
        case kCodesNk: return (static_cast<int64_t>(piece.rows) + 7) / 8 * fast_units(piece);
        case kScalesNg:
        case kScalesNg8:
        case kScalesNg32:
        case kZerosNg: return fast_units(piece) * piece.cols;
        case kZerosGn:
        case kScalesGn:
        case kScalesGn32:
        case kPlainNk: return fast_units(piece) * piece.rows;
        default: return 1;
    }
}

QPN_BOTH void convert_unit(const Job& job, uint32_t unit) {
    const Piece& piece = job.piece;
    const uint32_t width = static_cast<uint32_t>(fast_units(piece));
    const int64_t slow = unit / width, fast = unit % width;
    switch (piece.role) {
        case kCodesKn: return codes_kn(job, slow, fast);
        case kCodesNk: return codes_nk(job, slow, fast);
        case kScalesGn:
            return scale(job, piece.dest_row + slow, fast, load16(job.row(slow) + fast * 2));
        case kScalesNg:
            return scale(job, slow, piece.dest_row + fast, load16(job.row(fast) + slow * 2));
        case kScalesNg8:
            return block_scale(job, slow, piece.dest_row + fast, job.row(fast)[slow]);
        case kScalesGn32:
        case kScalesNg32: return scale_of_32(job, wide_scale(job, unit));
        case kZerosGn:
            return zeros_of_word(job, piece.dest_row + slow, 8 * fast,
                                 load32(job.row(slow) + fast * 4), true);
        case kZerosNg:
            return zeros_of_word(job, slow, piece.dest_row + 8 * fast,
                                 load32(job.row(fast) + slow * 4), false);
        case kGlobalF32: return global_scale(job, false);
        case kGlobalBf16: return global_scale(job, true);
        case kCheckShape: return check_shape(job);
        case kCheckGroups: return check_groups(job);
        case kPlainNk: return plain_value(job, slow, fast);
        default: return;
    }
}

}  // namespace conversion
}  // namespace qpn
