// Preloaded by tests: an operator new that fails at a chosen call, and a pthread_create that fails
// while it is told to. Everything else behaves as ever.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> left{-1};
std::atomic<bool> no_threads{false};
}  // namespace

extern "C" void arm(long number) { left = number; }
// Whether the chosen call was never reached.
extern "C" int disarm() { return left.exchange(-1) >= 0; }
extern "C" void refuse_threads(int refuse) { no_threads = refuse != 0; }

void* operator new(std::size_t bytes) {
    if (left.load() >= 0 && left.fetch_sub(1) == 0) throw std::bad_alloc();
    if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
    throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attr, void* (*run)(void*), void* argument) {
    using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    static const Create create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
    return no_threads ? EAGAIN : create(thread, attr, run, argument);
}
