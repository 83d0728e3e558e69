#include "names.h"

#include <string.h>  // memmem

#include <vector>

#include "json.h"

namespace qpn {
namespace {

constexpr char kExperts[] = ".experts.";
constexpr int64_t kExpertsBytes = sizeof kExperts - 1;
constexpr int64_t kMostDigits = 9;  // NUMBER of loader/checkpoint/family.py

// Calls each(number, name) for every name; false where there are not so many.
template <class Each>
bool for_each(const Names& names, const Each& each) {
    const uint8_t *at = names.text, *end = names.text + names.bytes;
    for (int64_t n = 0; n < names.count; ++n) {
        const auto* stop =
            static_cast<const uint8_t*>(at == end ? nullptr : memchr(at, '\n', static_cast<size_t>(end - at)));
        if (stop == nullptr || !each(n, Text{at, stop - at})) return false;
        at = stop + 1;
    }
    return at == end;
}

const uint8_t* find_experts(const uint8_t* at, const uint8_t* end) {
    return static_cast<const uint8_t*>(memmem(at, static_cast<size_t>(end - at), kExperts, kExpertsBytes));
}

// What stands before and behind the number of an expert's name.
struct Split {
    Text head, rest;
    int64_t expert;

    bool operator==(const Split& other) const { return head == other.head && rest == other.rest; }
};

// kNoExpert, kAlone, or 0 for a name that was split.
int32_t split(Text name, Split& found) {
    const uint8_t* end = name.at + name.bytes;
    const uint8_t* dot = find_experts(name.at, end);
    if (dot == nullptr) return kNoExpert;
    const uint8_t* at = dot + kExpertsBytes;
    const uint8_t* digits = at;
    found.expert = 0;
    for (; at < end && *at >= '0' && *at <= '9' && at - digits < kMostDigits; ++at)
        found.expert = found.expert * 10 + (*at - '0');
    const bool plain = at > digits && (*digits != '0' || at - digits == 1) && at < end && *at == '.';
    if (!plain) return kAlone;
    found.head = {name.at, dot - name.at};
    found.rest = {at + 1, end - at - 1};
    // Another component of that word, the last one too: the number may be another's.
    constexpr int64_t kWord = kExpertsBytes - 1;  // ".experts"
    if (find_experts(at, end) != nullptr) return kAlone;
    return end - at >= kWord && memcmp(end - kWord, kExperts, kWord) == 0 ? kAlone : 0;
}

}  // namespace

int64_t find_kinds(const Names& names, int32_t* kinds, int64_t* experts, int64_t* firsts) {
    Interner known;
    std::vector<Split> splits;
    const auto each = [&](int64_t n, Text name) {
        Split own;
        experts[n] = -1;
        kinds[n] = split(name, own);
        if (kinds[n] < 0) return true;
        const auto same = [&](int64_t kind) { return splits[static_cast<size_t>(kind)] == own; };
        const int64_t kind = known.number(hash_of(own.rest, hash_of(own.head)), same);
        if (kind == Interner::kGaveUp) return false;
        if (kind == static_cast<int64_t>(splits.size())) {
            firsts[kind] = n;
            splits.push_back(own);
        }
        kinds[n] = static_cast<int32_t>(kind);
        experts[n] = own.expert;
        return true;
    };
    return for_each(names, each) ? known.size() : -1;
}

namespace {

class IndexReader {
   public:
    explicit IndexReader(IndexTable& table)
        : table_(table), json_(table.json, table.bytes), names_(table.bytes / kUsualMappingBytes) {}

    bool read() {
        Unique keys;
        bool found = false;
        const auto member = [&](Text key) {
            if (!keys.each(key)) return false;
            const char wanted[] = "weight_map";
            if (!(key == Text{reinterpret_cast<const uint8_t*>(wanted), sizeof wanted - 1})) return json_.skip(1);
            found = true;
            return json_.take('{') && json_.members([this](Text name) { return mapping(name); });
        };
        if (!json_.take('{') || !json_.members(member)) return false;
        json_.space();
        return found && json_.done() && table_.tensors > 0;
    }

   private:
    bool mapping(Text name) {
        Text file;
        if (!names_.each(name) || !json_.plain(file)) return false;
        const auto same = [&](int64_t n) { return files_[static_cast<size_t>(n)] == file; };
        const int64_t known = distinct_.size();
        const int64_t number = distinct_.number(hash_of(file), same);
        if (number == Interner::kGaveUp || table_.tensors >= table_.most_tensors) return false;
        if (number == known) {
            files_.push_back(file);
            if (!write(file, table_.files, table_.files_bytes)) return false;
            ++table_.file_count;
        }
        table_.file_ids[table_.tensors++] = static_cast<int32_t>(number);
        return write(name, table_.names, table_.names_bytes);
    }

    bool write(Text text, uint8_t* place, int64_t& written) const {
        if (written + text.bytes >= table_.most_text) return false;
        if (text.bytes) memcpy(place + written, text.at, static_cast<size_t>(text.bytes));
        written += text.bytes;
        place[written++] = '\n';
        return true;
    }

    static constexpr int64_t kUsualMappingBytes = 80;

    IndexTable& table_;
    Json json_;
    Unique names_;
    Interner distinct_;
    std::vector<Text> files_;
};

}  // namespace

void read_index(IndexTable& table) {
    table.tensors = table.names_bytes = table.file_count = table.files_bytes = 0;
    table.accepted = IndexReader(table).read();
}

bool find_owned(const Names& index, const int32_t* index_files, const Names& names,
                const int32_t* file_ids, uint8_t* owned) {
    Interner known(index.count);
    std::vector<Text> texts;
    texts.reserve(static_cast<size_t>(index.count));
    Text name;
    const auto same = [&](int64_t n) { return texts[static_cast<size_t>(n)] == name; };
    const auto add = [&](int64_t n, Text text) {
        name = text;
        if (known.number(hash_of(text), same) != n) return false;
        texts.push_back(text);
        return true;
    };
    const auto look = [&](int64_t n, Text text) {
        name = text;
        const int64_t found = known.find(hash_of(text), same);
        owned[n] = found >= 0 && index_files[found] == file_ids[n];
        return true;
    };
    return for_each(index, add) && for_each(names, look);
}

}  // namespace qpn
