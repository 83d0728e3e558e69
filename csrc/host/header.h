// The header of a safetensors file as columns: the native twin of loader/checkpoint/header.py.
#pragma once
#include <cstdint>

namespace qpn {

// loader/structs.py mirrors it. Pointers come with their capacities; the columns hold as many
// entries as the shortest ones can stand in the JSON.
struct HeaderTable {
    const uint8_t* data;  // prefix and JSON
    int64_t bytes;
    int64_t file_bytes;
    int64_t most_tensors;  // capacity of the columns, and of `ranks`
    int64_t most_names;    // capacity of `names`, bytes
    int64_t most_dims;     // capacity of `dims`
    uint8_t* names;        // in the order of the tensors' bytes, each followed by a newline
    uint8_t* dtypes;       // index into DTYPES of header.py
    int32_t* shape_ids;
    int64_t* begins;  // absolute, as are the ends
    int64_t* ends;
    uint64_t* dims;   // of the distinct shapes, one after another
    int32_t* ranks;   // of the distinct shapes
    int64_t tensors, names_bytes, shapes;  // results
    int64_t accepted;                      // 0: the reader in Python decides
};

constexpr int64_t kLeastEntryBytes = 49;  // "":{"dtype":"U8","shape":[],"data_offsets":[0,0]}

// Fills the table, or leaves `accepted` 0: refused, or written in a way that this one does not know.
void read_header(HeaderTable& table);

}  // namespace qpn
