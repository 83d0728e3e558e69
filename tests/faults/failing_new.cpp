// Preloaded by tests: an operator new that fails at a chosen call, and a pthread_create that fails
// from a chosen call on. Everything else behaves as ever.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> left{-1}, threads_left{-1};
std::atomic<bool> of_one_thread{false};
std::atomic<pthread_t> the_thread{};

bool is_chosen() {
    if (left.load() < 0 || (of_one_thread && !pthread_equal(the_thread, pthread_self()))) return false;
    return left.fetch_sub(1) == 0;
}

bool may_start() {
    long now = threads_left.load();
    while (now > 0 && !threads_left.compare_exchange_weak(now, now - 1)) {
    }
    return now != 0;
}
}  // namespace

extern "C" void arm(long number) {
    of_one_thread = false;
    left = number;
}
// Counts the calls of this thread alone.
extern "C" void arm_here(long number) {
    the_thread = pthread_self();
    of_one_thread = true;
    left = number;
}
// Whether the chosen call was never reached.
extern "C" int disarm() { return left.exchange(-1) >= 0; }
// So many more threads start; -1: as many as are asked for.
extern "C" void allow_threads(long number) { threads_left = number; }

void* operator new(std::size_t bytes) {
    if (is_chosen()) throw std::bad_alloc();
    if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
    throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attr, void* (*run)(void*), void* argument) {
    using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    static const Create create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
    return may_start() ? create(thread, attr, run, argument) : EAGAIN;
}
