// A cursor over JSON that somebody else wrote. It knows the plain subset in which tools write
// checkpoints; of all else it says no, and the reader in Python decides. What it takes, that reader
// takes too, with the same meaning. It never reads beyond its end.
#pragma once
#include <cstdint>

#include "interner.h"

namespace qpn {

class Json {
   public:
    Json(const uint8_t* at, int64_t bytes) : at_(at), end_(at + bytes) {}

    bool done() const { return at_ == end_; }
    void space();
    // The next byte after white space, taken where it is `byte`.
    bool take(uint8_t byte);
    bool peek(uint8_t byte);
    bool literal(const char* word);
    // A string without escapes, UTF-8, as it stands between its quotes.
    bool plain(Text& text);
    // Any string that says UTF-8: no half of a surrogate pair.
    bool string();
    // A whole number from 0 to 2^64 - 1 without sign, point or exponent.
    bool whole(uint64_t& number);
    // Any value at all, each key once in every object.
    bool skip(int depth = 0);

    // The members of an object behind its brace: member() is called for each key, after its colon.
    template <class Member>
    bool members(const Member& member) {
        if (take('}')) return true;
        Text key;
        do {
            space();
            if (!plain(key) || !take(':')) return false;
            space();
            if (!member(key)) return false;
        } while (take(','));
        return take('}');
    }

   private:
    bool number();
    bool character();
    bool escape();
    bool hex(uint32_t& unit);

    const uint8_t* at_;
    const uint8_t* end_;
};

// Counts keys; each() is false for one that occurred before, and where too many collide.
class Unique {
   public:
    explicit Unique(int64_t expected = 16) : known_(expected) { keys_.reserve(static_cast<size_t>(expected)); }
    bool each(Text key) {
        const int64_t count = static_cast<int64_t>(keys_.size());
        const auto same = [&](int64_t n) { return keys_[static_cast<size_t>(n)] == key; };
        if (known_.number(hash_of(key), same) != count) return false;
        keys_.push_back(key);
        return true;
    }

   private:
    Interner known_;
    std::vector<Text> keys_;
};

}  // namespace qpn
