// The C interface of loader/checkpoint/scan.py: headers, the index, names. A call that says no (0
// or -1), out of memory too, leaves the matter to the readers in Python.
#include "header.h"
#include "names.h"
#include "pool.h"

#define QPN_API extern "C" __attribute__((visibility("default")))

// Each table says for itself whether it was accepted.
QPN_API void qpn_headers(qpn::HeaderTable* tables, int64_t count, int threads) {
    for (int64_t n = 0; n < count; ++n) tables[n].accepted = 0;
    try {
        qpn::parallel(threads, count, [&](int64_t n, int) { qpn::read_header(tables[n]); });
    } catch (...) {
    }
}

QPN_API void qpn_index(qpn::IndexTable* table) try {
    table->accepted = 0;
    qpn::read_index(*table);
} catch (...) {
    table->accepted = 0;
}

QPN_API int64_t qpn_kinds(const uint8_t* text, int64_t bytes, int64_t count, int32_t* kinds,
                          int64_t* experts, int64_t* firsts) try {
    return qpn::find_kinds({text, bytes, count}, kinds, experts, firsts);
} catch (...) {
    return -1;
}

QPN_API int qpn_owned(const uint8_t* index, int64_t index_bytes, int64_t index_count,
                      const int32_t* index_files, const uint8_t* text, int64_t bytes, int64_t count,
                      const int32_t* file_ids, uint8_t* owned) try {
    return qpn::find_owned({index, index_bytes, index_count}, index_files, {text, bytes, count}, file_ids, owned);
} catch (...) {
    return 0;
}
