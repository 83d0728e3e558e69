// As much of CUDA's runtime as the ring uses, on the host: a stream is a thread that runs what is
// enqueued, in order, some time later. For tests of the ring where there is no card.
#pragma once
#include <stddef.h>
#include <string.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#define CUDART_VERSION 0
#define cudaStreamNonBlocking 1
#define cudaEventDisableTiming 2
#define cudaHostRegisterPortable 1

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600,
    cudaErrorUnknown = 999
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };

// Calls of this CUDA that fail: their name, how many go well before the first, how many fail.
struct FakeFault {
    std::mutex mutex;
    std::string name;
    long before = 0, times = 0;
};
inline FakeFault& fake_fault() {
    static FakeFault* fault = new FakeFault();
    return *fault;
}
inline bool fails(const char* name) {
    FakeFault& fault = fake_fault();
    std::lock_guard<std::mutex> hold(fault.mutex);
    return fault.name == name && fault.before-- <= 0 && fault.times-- > 0;
}
#define FAKE_CALL() \
    if (fails(__func__)) return cudaErrorInvalidValue

// CUDA throws nothing: where it gets no memory or no thread, it says so.
template <class Act>
cudaError_t fake_call(const Act& act) {
    try {
        act();
        return cudaSuccess;
    } catch (const std::bad_alloc&) {
        return cudaErrorMemoryAllocation;
    } catch (const std::system_error&) {
        return cudaErrorUnknown;
    }
}

inline const char* cudaGetErrorString(cudaError_t) { return "a fault of the fake"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
    FAKE_CALL();
    return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaHostRegister(void*, size_t, unsigned) {
    FAKE_CALL();
    return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void*) {
    FAKE_CALL();
    return cudaSuccess;
}

struct FakeEvent {
    std::mutex mutex;
    std::condition_variable passed;
    long recorded = 0, reached = 0;
};
using cudaEvent_t = FakeEvent*;

class FakeStream {
   public:
    FakeStream() : thread_([this] { run(); }) {}
    ~FakeStream() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            closing_ = true;
            changed_.notify_all();
        }
        thread_.join();
    }
    void enqueue(std::function<void()> work) {
        std::lock_guard<std::mutex> hold(mutex_);
        queue_.push_back(std::move(work));
        changed_.notify_all();
    }
    void synchronize() {
        std::unique_lock<std::mutex> hold(mutex_);
        changed_.wait(hold, [&] { return queue_.empty() && !busy_; });
    }

   private:
    void run() {
        for (;;) {
            std::function<void()> work;
            {
                std::unique_lock<std::mutex> hold(mutex_);
                changed_.wait(hold, [&] { return closing_ || !queue_.empty(); });
                if (queue_.empty()) return;
                work = std::move(queue_.front());
                queue_.pop_front();
                busy_ = true;
            }
            work();
            std::lock_guard<std::mutex> hold(mutex_);
            busy_ = false;
            changed_.notify_all();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    bool busy_ = false, closing_ = false;
    std::thread thread_;
};
using cudaStream_t = FakeStream*;

inline FakeStream& fake_stream(cudaStream_t stream) {
    static FakeStream* usual = new FakeStream();
    return stream == nullptr ? *usual : *stream;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    FAKE_CALL();
    return fake_call([&] { *stream = new FakeStream(); });
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return fake_stream(stream).synchronize(), cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    FAKE_CALL();
    return fake_call([&] { *event = new FakeEvent(); });
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    FAKE_CALL();
    std::lock_guard<std::mutex> hold(event->mutex);
    const long mine = event->recorded + 1;
    const cudaError_t code = fake_call([&] {
        fake_stream(stream).enqueue([event, mine] {
            std::lock_guard<std::mutex> hold(event->mutex);
            event->reached = mine;
            event->passed.notify_all();
        });
    });
    if (code == cudaSuccess) event->recorded = mine;
    return code;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::mutex> hold(event->mutex);
    return event->reached == event->recorded ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    FAKE_CALL();
    std::lock_guard<std::mutex> hold(event->mutex);
    const long wanted = event->recorded;
    return fake_call([&] {
        fake_stream(stream).enqueue([event, wanted] {
            std::unique_lock<std::mutex> hold(event->mutex);
            event->passed.wait(hold, [&] { return event->reached >= wanted; });
        });
    });
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
    FAKE_CALL();
    return fake_call([&] {
        fake_stream(stream).enqueue([=] {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
            memcpy(to, from, bytes);
        });
    });
}
