#include "header.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "json.h"

namespace qpn {
namespace {

constexpr int64_t kPrefixBytes = 8;

struct Dtype {
    const char* name;
    uint64_t bits;
};
// In the order of DTYPES of loader/checkpoint/header.py.
constexpr Dtype kDtypes[] = {
    {"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8},     {"F8_E8M0", 8},     {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
    {"I16", 16},    {"U16", 16},        {"F16", 16},        {"BF16", 16},   {"I32", 32}, {"U32", 32},
    {"F32", 32},    {"C64", 64},        {"F64", 64},        {"I64", 64},    {"U64", 64},
};

inline bool is(Text text, const char* word) {
    return text == Text{reinterpret_cast<const uint8_t*>(word), static_cast<int64_t>(strlen(word))};
}

struct Entry {
    Text name;
    uint64_t begin, end;
    int32_t shape;
    uint8_t dtype;
};

class Reader {
   public:
    explicit Reader(HeaderTable& table)
        : table_(table), json_(table.data + kPrefixBytes, table.bytes - kPrefixBytes) {}

    bool read() {
        if (table_.bytes <= kPrefixBytes || table_.data[kPrefixBytes] != '{') return false;
        uint64_t length;
        memcpy(&length, table_.data, kPrefixBytes);  // little-endian, as the machine is
        if (length != static_cast<uint64_t>(table_.bytes - kPrefixBytes) || table_.bytes > table_.file_bytes)
            return false;
        entries_.reserve(static_cast<size_t>(table_.bytes / 128));
        if (!json_.take('{') || !json_.members([this](Text name) { return member(name); })) return false;
        json_.space();
        return json_.done() && names_differ() && place();
    }

   private:
    bool member(Text name) {
        if (is(name, "__metadata__")) return !metadata_ && (metadata_ = true) && metadata();
        Entry entry{name, 0, 0, 0, 0};
        if (static_cast<int64_t>(entries_.size()) >= table_.most_tensors || !fields(entry)) return false;
        entries_.push_back(entry);
        return true;
    }

    bool metadata() {
        if (json_.literal("null")) return true;
        Unique keys;
        return json_.take('{') && json_.members([&](Text key) { return keys.each(key) && json_.string(); });
    }

    // The three keys of an entry, each once, in any order.
    bool fields(Entry& entry) {
        int seen = 0;
        const auto field = [&](Text key) {
            const int one = is(key, "dtype") ? 1 : is(key, "shape") ? 2 : is(key, "data_offsets") ? 4 : 0;
            if (one == 0 || (seen & one)) return false;
            seen |= one;
            if (one == 1) return dtype(entry.dtype);
            if (one == 2) return shape(entry.shape);
            return json_.take('[') && number(entry.begin) && json_.take(',') && number(entry.end) &&
                   json_.take(']');
        };
        return json_.take('{') && json_.members(field) && seen == 7 && fits(entry);
    }

    bool number(uint64_t& value) {
        json_.space();
        return json_.whole(value);
    }

    bool dtype(uint8_t& found) {
        Text text;
        if (!json_.plain(text)) return false;
        for (size_t n = 0; n < std::size(kDtypes); ++n)
            if (is(text, kDtypes[n].name)) return found = static_cast<uint8_t>(n), true;
        return false;
    }

    // The shape goes behind those that are known, and stays there where it is new.
    bool shape(int32_t& found) {
        int64_t rank = 0;
        if (!json_.take('[')) return false;
        if (!json_.take(']')) {
            do {
                if (dims_ + rank >= table_.most_dims || !number(table_.dims[dims_ + rank])) return false;
                ++rank;
            } while (json_.take(','));
            if (!json_.take(']')) return false;
        }
        const Text own = dims(dims_, rank);
        const auto same = [&](int64_t n) { return shapes_[static_cast<size_t>(n)] == own; };
        const int64_t known = distinct_.size();
        const int64_t number = distinct_.number(hash_of(own), same);
        if (number == Interner::kGaveUp || number >= table_.most_tensors) return false;
        if (number == known) {
            shapes_.push_back(own);
            table_.ranks[number] = static_cast<int32_t>(rank);
            dims_ += rank;
        }
        found = static_cast<int32_t>(number);
        return true;
    }

    Text dims(int64_t first, int64_t rank) const {
        return {reinterpret_cast<const uint8_t*>(table_.dims + first), rank * 8};
    }

    // Bytes = shape x bits: whole bytes, no step of the product beyond 64 bits.
    bool fits(const Entry& entry) const {
        const Text shape = shapes_[static_cast<size_t>(entry.shape)];
        uint64_t product = 1;
        for (int64_t n = 0; n < shape.bytes; n += 8) {
            uint64_t factor;
            memcpy(&factor, shape.at + n, 8);
            if (__builtin_mul_overflow(product, factor, &product)) return false;
        }
        if (__builtin_mul_overflow(product, kDtypes[entry.dtype].bits, &product) || product % 8) return false;
        return entry.end <= static_cast<uint64_t>(INT64_MAX) && entry.begin <= entry.end &&
               entry.end - entry.begin == product / 8;
    }

    bool names_differ() const {
        Unique names(static_cast<int64_t>(entries_.size()));
        return std::all_of(entries_.begin(), entries_.end(), [&](const Entry& e) { return names.each(e.name); });
    }

    // Writes the columns in the order of the bytes, which follow one another without hole or overlap.
    bool place() {
        std::vector<uint32_t> order(entries_.size());
        std::iota(order.begin(), order.end(), 0u);
        const auto before = [this](uint32_t a, uint32_t b) {
            const Entry &x = entries_[a], &y = entries_[b];
            return x.begin != y.begin ? x.begin < y.begin : x.end < y.end;
        };
        if (!std::is_sorted(order.begin(), order.end(), before))
            std::stable_sort(order.begin(), order.end(), before);
        uint64_t follows = 0;
        int64_t written = 0, row = 0;
        for (const uint32_t number : order) {
            const Entry& entry = entries_[number];
            if (entry.begin != follows || written + entry.name.bytes >= table_.most_names) return false;
            follows = entry.end;
            if (follows > static_cast<uint64_t>(table_.file_bytes - table_.bytes)) return false;
            if (entry.name.bytes) memcpy(table_.names + written, entry.name.at, static_cast<size_t>(entry.name.bytes));
            written += entry.name.bytes;
            table_.names[written++] = '\n';
            table_.dtypes[row] = entry.dtype;
            table_.shape_ids[row] = entry.shape;
            table_.begins[row] = static_cast<int64_t>(entry.begin) + table_.bytes;
            table_.ends[row++] = static_cast<int64_t>(entry.end) + table_.bytes;
        }
        table_.tensors = row;
        table_.names_bytes = written;
        table_.shapes = distinct_.size();
        return follows == static_cast<uint64_t>(table_.file_bytes - table_.bytes);
    }

    HeaderTable& table_;
    Json json_;
    std::vector<Entry> entries_;
    Interner distinct_;
    std::vector<Text> shapes_;
    int64_t dims_ = 0;
    bool metadata_ = false;
};

}  // namespace

void read_header(HeaderTable& table) { table.accepted = Reader(table).read(); }

}  // namespace qpn
