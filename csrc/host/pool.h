// A pool of threads that takes jobs by number. One parallel region runs at a time; a second caller
// meanwhile runs its jobs on its own thread, so that nothing waits for a stranger.
#pragma once
#include <cstdint>
#include <functional>

namespace qpn {

// Calls job(number, worker) for number in [0, jobs), on at most `threads` threads (the caller is
// one). `worker` is below `threads` and held by one job at a time.
void parallel(int threads, int64_t jobs, const std::function<void(int64_t, int)>& job);

}  // namespace qpn
