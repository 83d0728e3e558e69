// Names of tensors, many at once: whose experts they are, and which file the index gives them to.
#pragma once
#include <cstdint>

namespace qpn {

// Texts of names: each followed by a newline, which no name holds.
struct Names {
    const uint8_t* text;
    int64_t bytes;
    int64_t count;
};

constexpr int32_t kNoExpert = -1;  // no component `experts` with something below it
constexpr int32_t kAlone = -2;     // its number is no plain one, or it has more such components

// For each name the kind: names of one kind differ in the number behind `.experts.` alone, which
// goes to `experts`. `firsts` holds the first name of each kind. Returns how many kinds there are,
// or -1 where the text does not hold so many names or too many collide.
int64_t find_kinds(const Names& names, int32_t* kinds, int64_t* experts, int64_t* firsts);

// The index of a checkpoint: which file supplies each tensor. loader/structs.py mirrors it.
struct IndexTable {
    const uint8_t* json;
    int64_t bytes;
    int64_t most_tensors;  // capacity of `file_ids`
    int64_t most_text;     // capacity of `names` and of `files`, bytes
    uint8_t* names;        // as in Names, in the order of the JSON
    uint8_t* files;        // the distinct files alike
    int32_t* file_ids;
    int64_t tensors, names_bytes, file_count, files_bytes;  // results
    int64_t accepted;                                       // 0: the reader in Python decides
};

constexpr int64_t kLeastMappingBytes = 5;  // "":""

void read_index(IndexTable& table);

// owned[i] = whether `index` gives the i-th of `names` to the file that `file_ids` says (-1: none).
// False where the texts do not hold so many names or too many collide.
bool find_owned(const Names& index, const int32_t* index_files, const Names& names,
                const int32_t* file_ids, uint8_t* owned);

}  // namespace qpn
