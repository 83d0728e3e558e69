#include "check.h"

namespace qpn {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // sizes below this cannot overflow when multiplied once

bool within(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

// Bytes of a source row that `cols` columns take.
int64_t used_bytes(const Descriptor& piece) {
    switch (piece.role) {
        case kCodesKn:
        case kCodesNk:
        case kZerosGn: return piece.cols / 2;
        case kScalesNg8: return piece.cols;
        case kZerosNg:
        case kGlobalF32:
        case kScalesGn32:
        case kScalesNg32:
        case kCheckGroups: return piece.cols * 4;
        case kCheckShape: return piece.cols * 8;
        default: return piece.cols * 2;
    }
}

int64_t plane_bytes(const Bank& bank, int tensor) {
    if (tensor == 0) {
        if (bank.kind == kPlain) return bank.experts * bank.n * bank.k * 2;
        return bank.experts * bank.expert_words() * 4;
    }
    const int64_t entries = bank.experts * bank.plane();
    if (bank.kind == kE2m1) {
        if (tensor == 2) return bank.experts * bank.projections * 4;
        return bank.layout == kWide ? entries * 2 : entries;
    }
    if (tensor == 2) return entries / 2;
    return entries * (bank.layout == kCompact ? 2 : bank.layout == kRecord ? 3 : 4);
}

// Rows and columns that the role may reach in the bank; false for a role that the bank lacks.
bool limits(const Descriptor& piece, const Bank& bank, int64_t& rows, int64_t& cols) {
    const bool int4 = bank.kind == kInt4, e2m1 = bank.kind == kE2m1;
    switch (piece.role) {
        case kCodesKn: rows = bank.k, cols = bank.columns(); return int4;
        case kCodesNk: rows = bank.columns(), cols = bank.k; return int4 || e2m1;
        case kScalesGn:
        case kScalesGn32:
        case kZerosGn: rows = bank.groups(), cols = bank.columns(); return int4;
        case kScalesNg:
        case kScalesNg32:
        case kZerosNg: rows = bank.columns(), cols = bank.groups(); return int4;
        case kScalesNg8: rows = bank.columns(), cols = bank.groups(); return e2m1;
        case kGlobalF32:
        case kGlobalBf16: rows = cols = 1; return e2m1;
        case kCheckShape: rows = 1, cols = 2; return true;
        case kCheckGroups: rows = 1, cols = kMost; return piece.expect_a > 0;
        case kPlainNk: rows = bank.columns(), cols = bank.k; return bank.kind == kPlain;
        default: return false;
    }
}

bool aligned(const Descriptor& piece, const Bank& bank) {
    switch (piece.role) {
        case kCodesKn: return piece.dest_row % 8 == 0 && piece.cols % 8 == 0;
        case kCodesNk:
            return piece.dest_row % (kTile / bank.projections) == 0 && piece.cols % 8 == 0;
        case kZerosGn: return piece.cols % 8 == 0;
        case kZerosNg: return piece.dest_row % 8 == 0;
        case kCheckShape: return piece.cols == 2;
        default: return true;
    }
}

}  // namespace

int64_t row_features(int64_t role) { return role == kZerosNg ? 8 : 1; }

std::string check_layer(const Layer& layer, bool converts) {
    for (const Bank& bank : layer.bank) {
        const bool known = within(bank.kind, kInt4, kAbsent) && within(bank.layout, kCompact, kAsIs) &&
                           within(bank.scale_dtype, kF16, kU8) &&
                           within(bank.sense, kNoGlobal, kDivisor) &&
                           within(bank.projections, 1, 2);
        const bool sized = within(bank.experts, 1, 1 << 24) && within(bank.k, 1, 1 << 24) &&
                           within(bank.n, bank.projections, 1 << 24) && within(bank.group, 1, 1 << 24) &&
                           within(bank.phase, 0, bank.group - 1) && bank.n % bank.projections == 0;
        if (!known || !sized) return "the layer's numbers are not those of a layer";
        if (bank.kind == kAbsent) continue;  // W13 of a linear
        const bool even = bank.columns() % 2 == 0;
        if (bank.kind == kInt4 && bank.layout == kCompact && !even)
            return "packed zero points need an even number of columns";
        // Words are stored past the cache in pieces of 32 bytes.
        if (bank.kind != kPlain && reinterpret_cast<uintptr_t>(bank.tensor[0]) % 32)
            return "weight words do not start on a 32-byte boundary";
        for (int t = 0; t < bank.tensors(); ++t)
            if (bank.tensor[t] == nullptr || bank.bytes[t] != plane_bytes(bank, t))
                return "a bank tensor does not have the bytes of its layout";
        if (converts && bank.kind == kE2m1 && bank.layout == kWide &&
            (layer.cache == nullptr || layer.cache_bytes < bank.experts * 12))
            return "the conversion cache is smaller than the layer needs";
    }
    return "";
}

std::string check_descriptor(const Descriptor& piece, const Layer& layer, int64_t chunk_bytes) {
    if (!within(piece.bank, 0, 1)) return "bank is neither 0 nor 1";
    const Bank& bank = layer.bank[piece.bank];
    if (!within(piece.projection, 0, 2) || (piece.projection == 2) != (piece.bank == 1))
        return "projection and bank do not go together";
    if (!within(piece.slot, 0, bank.experts - 1)) return "slot is outside the bank";
    int64_t rows = 0, cols = 0;
    if (bank.kind == kAbsent) return "the bank is absent";
    if (!limits(piece, bank, rows, cols)) return "role does not belong to this bank";
    if (!within(piece.rows, 1, kMost) || !within(piece.cols, 1, kMost) ||
        !within(piece.row_bytes, 1, kMost) || !within(piece.skip, 0, kMost) ||
        !within(piece.dest_row, 0, kMost))
        return "a size is not positive";
    if (piece.cols > cols || piece.rows > rows ||
        piece.dest_row + piece.rows * row_features(piece.role) > rows)
        return "destination is outside the bank";
    if (!aligned(piece, bank)) return "destination does not start where words do";
    if (piece.skip + used_bytes(piece) > piece.row_bytes) return "columns reach past the row";
    if (piece.offset < 0 || piece.offset > chunk_bytes ||
        piece.rows > (chunk_bytes - piece.offset) / piece.row_bytes)
        return "source reaches outside the chunk";
    return "";
}

}  // namespace qpn
