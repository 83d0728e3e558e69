// What a call of a C interface says when it fails, for the host and for cards; Error of
// loader/structs.py mirrors the struct, loader/core.py and loader/cuda_core.py the codes.
#pragma once
#include <stdint.h>
#include <string.h>

#include <exception>
#include <new>

namespace qpn {

struct Error {
    int64_t subject, offset, wanted, got, error;
    char what[128];
};

enum Code : int { kDone = 0, kRefused = 1, kFailedRead = 2, kNoMemory = 3, kFailedCuda = 4 };

// Allocates nothing: it also speaks of memory that ran out.
inline int refuse(const char* what, int64_t subject, Error* error) {
    *error = Error{subject, -1, 0, 0, 0, {0}};
    strncpy(error->what, what, sizeof error->what - 1);
    return kRefused;
}

// Memory, or what else the system has too little of.
inline int lack(const char* what, Error* error) {
    refuse(what, -1, error);
    return kNoMemory;
}

// What a call returns whose body threw: nothing is thrown across a C interface.
inline int caught(Error* error) {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        return lack("memory ran out inside native code", error);
    } catch (const std::exception& thrown) {
        return refuse(thrown.what(), -1, error);
    }
}

}  // namespace qpn
