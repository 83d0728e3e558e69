// What a call of the C interface says when it fails; loader/core.py mirrors the struct.
#pragma once
#include <stdint.h>
#include <string.h>

namespace qpn {

struct Error {
    int64_t subject, offset, wanted, got, error;
    char what[128];
};

enum Code : int { kDone = 0, kRefused = 1, kFailedRead = 2, kFailedCuda = 4 };

inline int refuse(const char* what, int64_t subject, Error* error) {
    *error = Error{subject, -1, 0, 0, 0, {0}};
    strncpy(error->what, what, sizeof error->what - 1);
    return kRefused;
}

}  // namespace qpn
