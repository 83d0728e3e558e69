#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace qpn {
namespace {

using Job = std::function<void(int64_t, int)>;

// A decode step is a handful of short regions: waking a sleeper for each would cost more than some
// of them take, so threads look for a while before they sleep.
constexpr int kLooks = 4000;

inline void pause() {
#ifdef QPN_X86
    __builtin_ia32_pause();
#endif
}

template <class Condition>
inline void look(const Condition& met) {
    for (int n = 0; n < kLooks && !met(); ++n) pause();
}

struct Region {
    const Job* job;
    int64_t jobs;
    int threads;
    std::atomic<int64_t> next{0};
    std::atomic<int> joined{1};  // the caller is worker 0
    std::atomic<int> running{0};
    std::mutex error_mutex;
    std::exception_ptr error;  // of the first job that threw

    // Never throws: the region lies on the caller's stack, so the caller must outlast its workers.
    void work(int worker) noexcept {
        try {
            for (int64_t n = next.fetch_add(1); n < jobs; n = next.fetch_add(1)) (*job)(n, worker);
        } catch (...) {
            std::lock_guard<std::mutex> hold(error_mutex);
            if (!error) error = std::current_exception();
            next = jobs;  // what is left need not be done
        }
    }
};

class Pool {
   public:
    Pool() : owner_(getpid()) {}

    bool is_ours() const { return owner_ == getpid(); }

    bool run(int threads, int64_t jobs, const Job& job) {
        std::unique_lock<std::mutex> one(region_mutex_, std::try_to_lock);
        if (!one.owns_lock()) return false;
        Region region;
        region.job = &job;
        region.jobs = jobs;
        region.threads = threads;
        {
            std::lock_guard<std::mutex> hold(mutex_);
            grow(threads - 1);
            region_ = &region;
            generation_.fetch_add(1);
        }
        wake_.notify_all();
        region.work(0);
        look([&] { return region.running.load() == 0; });
        std::unique_lock<std::mutex> hold(mutex_);
        region_ = nullptr;  // no worker joins from here on
        done_.wait(hold, [&] { return region.running.load() == 0; });
        hold.unlock();
        if (region.error) std::rethrow_exception(region.error);
        return true;
    }

   private:
    // Fewer workers serve where the system gives no more threads, or no memory for them.
    void grow(int workers) {
        try {
            while (static_cast<int>(workers_.size()) < workers)
                workers_.emplace_back([this] { serve(); });
        } catch (const std::exception&) {
        }
    }

    void serve() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> hold(mutex_, std::defer_lock);
        for (;;) {
            look([&] { return generation_.load() != seen; });
            hold.lock();
            wake_.wait(hold, [&] { return generation_.load() != seen; });
            seen = generation_.load();
            Region* region = region_;
            if (region == nullptr || region->joined.load() >= region->threads) {
                hold.unlock();
                continue;
            }
            const int worker = region->joined.fetch_add(1);
            region->running.fetch_add(1);
            hold.unlock();
            region->work(worker);
            hold.lock();
            if (region->running.fetch_sub(1) == 1) done_.notify_all();
            hold.unlock();
        }
    }

    const pid_t owner_;
    std::mutex region_mutex_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    Region* region_ = nullptr;
    std::atomic<uint64_t> generation_{0};
};

// Never destroyed: its threads live as long as the process. A fork leaves a pool without threads,
// so a child makes its own and lets the old one be.
Pool& pool() {
    static std::mutex mutex;
    static Pool* current = nullptr;
    std::lock_guard<std::mutex> hold(mutex);
    if (current == nullptr || !current->is_ours()) current = new Pool();
    return *current;
}

}  // namespace

void parallel(int threads, int64_t jobs, const Job& job) {
    threads = static_cast<int>(std::min<int64_t>(threads, jobs));
    if (threads > 1 && pool().run(threads, jobs, job)) return;
    for (int64_t n = 0; n < jobs; ++n) job(n, 0);
}

}  // namespace qpn
