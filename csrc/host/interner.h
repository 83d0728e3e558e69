// Numbers for distinct keys, by a hash table whose probes are bounded: keys that a file chose to
// collide make it give up, never make it slow.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

namespace qpn {

struct Text {
    const uint8_t* at;
    int64_t bytes;

    bool operator==(const Text& other) const {
        return bytes == other.bytes && (bytes == 0 || memcmp(at, other.at, static_cast<size_t>(bytes)) == 0);
    }
};

inline uint64_t mix(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t hash_of(Text text, uint64_t seed = 0) {
    constexpr uint64_t kA = 0x9e3779b97f4a7c15, kB = 0xd1b54a32d192ed03;
    uint64_t hash = mix(seed ^ kA, static_cast<uint64_t>(text.bytes) ^ kB);
    int64_t n = 0;
    for (; n + 8 <= text.bytes; n += 8) {
        uint64_t word;
        memcpy(&word, text.at + n, 8);
        hash = mix(hash ^ word, kB);
    }
    uint64_t word = 0;
    if (n < text.bytes) memcpy(&word, text.at + n, static_cast<size_t>(text.bytes - n));
    return mix(hash ^ word, kA);
}

class Interner {
   public:
    static constexpr int64_t kGaveUp = -1;

    explicit Interner(int64_t expected = 16) { resize(expected); }

    int64_t size() const { return static_cast<int64_t>(hashes_.size()); }

    // The number of the key, a new one where no known number is the `same`; or kGaveUp.
    template <class Same>
    int64_t number(uint64_t hash, const Same& same) {
        if (size() * 4 >= static_cast<int64_t>(slots_.size())) resize(size() * 2);
        if (lost_) return kGaveUp;
        uint64_t slot = hash & mask_;
        for (int probe = 0; probe < kMostProbes; ++probe, slot = (slot + 1) & mask_) {
            const uint32_t held = slots_[slot];
            if (held == 0) {
                if (size() >= kMostKeys) return kGaveUp;
                hashes_.push_back(hash);
                slots_[slot] = static_cast<uint32_t>(size());
                return size() - 1;
            }
            if (hashes_[held - 1] == hash && same(static_cast<int64_t>(held) - 1)) return held - 1;
        }
        return kGaveUp;
    }

    // The number of a known key, or kGaveUp for one that is not known.
    template <class Same>
    int64_t find(uint64_t hash, const Same& same) const {
        uint64_t slot = hash & mask_;
        for (int probe = 0; probe < kMostProbes; ++probe, slot = (slot + 1) & mask_) {
            const uint32_t held = slots_[slot];
            if (held == 0) break;
            if (hashes_[held - 1] == hash && same(static_cast<int64_t>(held) - 1)) return held - 1;
        }
        return kGaveUp;
    }

   private:
    static constexpr int kMostProbes = 256;
    static constexpr int64_t kMostKeys = INT64_C(1) << 28;

    // A quarter full at most, so that honest keys stay far from the bound.
    void resize(int64_t keys) {
        uint64_t slots = 64;
        while (slots < static_cast<uint64_t>(keys) * 4) slots *= 2;
        slots_.assign(slots, 0);
        mask_ = slots - 1;
        for (size_t n = 0; n < hashes_.size(); ++n) {
            uint64_t slot = hashes_[n] & mask_;
            int probe = 0;
            for (; probe < kMostProbes && slots_[slot]; ++probe) slot = (slot + 1) & mask_;
            if (probe == kMostProbes)
                lost_ = true;
            else
                slots_[slot] = static_cast<uint32_t>(n + 1);
        }
    }

    std::vector<uint32_t> slots_;  // number + 1, 0 where free
    std::vector<uint64_t> hashes_;  // by number
    uint64_t mask_ = 0;
    bool lost_ = false;
};

}  // namespace qpn
