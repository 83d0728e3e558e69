#include "json.h"

namespace qpn {
namespace {

constexpr int kMostDepth = 32;
constexpr int64_t kMostDigits = 1000;  // Python has a bound of its own for whole numbers

inline bool is_digit(uint8_t byte) { return byte >= '0' && byte <= '9'; }

// Bytes below 32 or above 127, quotes and backslashes, marked in their top bits.
inline uint64_t unusual(uint64_t word) {
    constexpr uint64_t kOnes = 0x0101010101010101, kTops = 0x8080808080808080;
    const auto zero = [](uint64_t w) { return (w - kOnes) & ~w; };
    return (zero(word & ~(kOnes * 0x1f)) | zero(word ^ (kOnes * '"')) | zero(word ^ (kOnes * '\\')) | word) & kTops;
}

}  // namespace

void Json::space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
}

bool Json::peek(uint8_t byte) {
    space();
    return at_ < end_ && *at_ == byte;
}

bool Json::take(uint8_t byte) {
    if (!peek(byte)) return false;
    ++at_;
    return true;
}

bool Json::literal(const char* word) {
    const auto length = static_cast<int64_t>(strlen(word));
    if (end_ - at_ < length || memcmp(at_, word, static_cast<size_t>(length)) != 0) return false;
    at_ += length;
    return true;
}

bool Json::plain(Text& text) {
    if (at_ == end_ || *at_ != '"') return false;
    const uint8_t* start = ++at_;
    for (;;) {
        uint64_t word;
        while (end_ - at_ >= 8 && (memcpy(&word, at_, 8), unusual(word) == 0)) at_ += 8;
        if (at_ == end_ || *at_ == '\\') return false;
        if (*at_ == '"') break;
        if (!character()) return false;
    }
    text = {start, at_ - start};
    ++at_;
    return true;
}

bool Json::string() {
    if (at_ == end_ || *at_ != '"') return false;
    ++at_;
    while (at_ < end_ && *at_ != '"')
        if (!(*at_ == '\\' ? escape() : character())) return false;
    if (at_ == end_) return false;
    ++at_;
    return true;
}

// One character of UTF-8 that is no control character: no longer than need be, no surrogate.
bool Json::character() {
    const uint8_t first = *at_++;
    if (first < 0x80) return first >= 0x20;
    const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    if (first < 0xc2 || first > 0xf4 || end_ - at_ < more) return false;
    uint32_t point = first & (0x3fu >> more);
    for (int n = 0; n < more; ++n, ++at_) {
        if ((*at_ & 0xc0) != 0x80) return false;
        point = point << 6 | (*at_ & 0x3f);
    }
    constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    return point >= kLeast[more] && point <= 0x10ffff && !(point >= 0xd800 && point <= 0xdfff);
}

bool Json::hex(uint32_t& unit) {
    if (end_ - at_ < 4) return false;
    unit = 0;
    for (int n = 0; n < 4; ++n, ++at_) {
        const uint8_t byte = *at_;
        const int digit = is_digit(byte)                 ? byte - '0'
                          : byte >= 'a' && byte <= 'f' ? byte - 'a' + 10
                          : byte >= 'A' && byte <= 'F' ? byte - 'A' + 10
                                                         : -1;
        if (digit < 0) return false;
        unit = unit << 4 | static_cast<uint32_t>(digit);
    }
    return true;
}

bool Json::escape() {
    if (end_ - ++at_ < 1) return false;
    const uint8_t kind = *at_++;
    if (kind != 'u') return kind != 0 && strchr("\"\\/bfnrt", kind) != nullptr;
    uint32_t unit, low;
    if (!hex(unit)) return false;
    if (unit < 0xd800 || unit > 0xdfff) return true;
    return unit <= 0xdbff && literal("\\u") && hex(low) && low >= 0xdc00 && low <= 0xdfff;
}

bool Json::whole(uint64_t& number) {
    if (at_ == end_ || !is_digit(*at_)) return false;
    const uint8_t* start = at_;
    number = 0;
    for (; at_ < end_ && is_digit(*at_); ++at_)
        if (__builtin_mul_overflow(number, UINT64_C(10), &number) ||
            __builtin_add_overflow(number, static_cast<uint64_t>(*at_ - '0'), &number))
            return false;
    return *start != '0' || at_ - start == 1;
}

bool Json::number() {
    const uint8_t* start = at_;
    const auto digits = [&] {
        const uint8_t* first = at_;
        while (at_ < end_ && is_digit(*at_)) ++at_;
        return at_ - first;
    };
    if (at_ < end_ && *at_ == '-') ++at_;
    const bool zero = at_ < end_ && *at_ == '0';
    const int64_t count = digits();
    if (count == 0 || (zero && count > 1)) return false;
    if (at_ < end_ && *at_ == '.' && (++at_, digits() == 0)) return false;
    if (at_ < end_ && (*at_ == 'e' || *at_ == 'E')) {
        ++at_;
        if (at_ < end_ && (*at_ == '-' || *at_ == '+')) ++at_;
        if (digits() == 0) return false;
    }
    return at_ - start <= kMostDigits;
}

bool Json::skip(int depth) {
    space();
    if (at_ == end_ || depth > kMostDepth) return false;
    if (*at_ == '"') return string();
    if (*at_ == '{') {
        ++at_;
        Unique keys;
        return members([&](Text key) { return keys.each(key) && skip(depth + 1); });
    }
    if (*at_ == '[') {
        ++at_;
        if (take(']')) return true;
        do {
            if (!skip(depth + 1)) return false;
        } while (take(','));
        return take(']');
    }
    return literal("null") || literal("true") || literal("false") || number();
}

}  // namespace qpn
