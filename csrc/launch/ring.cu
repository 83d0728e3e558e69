#include "ring.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "convert.h"

namespace qpn {

int Ring::open(int device, const Slots& slots, int threads, int chunks, Error* error) {
    if (threads < 1 || chunks < 1 || slots.each < 1 || slots.count < 1 || slots.base == nullptr)
        return refuse("a ring has threads, slots and chunks", -1, error);
    device_ = device;
    slots_ = slots;
    if (const int code = failed(cudaSetDevice(device), "the card cannot be used", error)) return code;
    if (const int code = failed(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking),
                                "a stream could not be made", error))
        return code;
    const auto most = static_cast<size_t>(slots.count);
    chunks_.resize(static_cast<size_t>(chunks));
    copied_.resize(most, nullptr);
    for (int64_t slot = 0; slot < slots.count; ++slot) free_.push_back(slot);
    full_.make_room(most);
    batch_.make_room(most);
    flying_.make_room(most);
    landed_.reserve(most);
    if (const int code = make_events(error)) return code;
    return start(threads, error);
}

int Ring::make_events(Error* error) {
    std::vector<cudaEvent_t*> events;
    for (Chunk& chunk : chunks_) events.insert(events.end(), {&chunk.copied, &chunk.released});
    for (cudaEvent_t& event : copied_) events.push_back(&event);
    for (cudaEvent_t* event : events)
        if (const int code = failed(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                                    "an event could not be made", error))
            return code;
    return kDone;
}

int Ring::start(int threads, Error* error) {
    try {
        threads_.emplace_back([this] { serve_copies(); });
        for (int number = 0; number < threads; ++number)
            threads_.emplace_back([this] { serve_reads(); });
    } catch (const std::system_error&) {
        return lack("a reading thread could not be started", error);
    }
    return kDone;
}

// Reads in flight write into slots, copies into chunks: both end before the memory may go.
Ring::~Ring() {
    {
        std::lock_guard<std::mutex> hold(mutex_);
        closing_ = true;
    }
    work_.notify_all();
    full_now_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    cudaSetDevice(device_);
    if (copies_ != nullptr) cudaStreamSynchronize(copies_);
    for (Chunk& chunk : chunks_)
        for (cudaEvent_t event : {chunk.copied, chunk.released})
            if (event != nullptr) cudaEventDestroy(event);
    for (cudaEvent_t event : copied_)
        if (event != nullptr) cudaEventDestroy(event);
    if (copies_ != nullptr) cudaStreamDestroy(copies_);
}

int Ring::submit(int number, const Read* reads, int64_t count, Error* error) {
    if (number < 0 || number >= static_cast<int>(chunks_.size()))
        return refuse("the ring has no such chunk", number, error);
    Chunk& chunk = chunks_[static_cast<size_t>(number)];
    // An event that was never recorded is one that has passed.
    if (const int code = failed(cudaStreamWaitEvent(copies_, chunk.released, 0),
                                "the copies could not be ordered", error))
        return code;
    std::lock_guard<std::mutex> hold(mutex_);
    if (chunk.pending != 0) return refuse("the chunk is still on its way", number, error);
    chunk.code = kDone;
    queue(chunk, reads, count);
    work_.notify_all();
    return kDone;
}

// The reads of a chunk in segments, all of them or none; the lock is held.
void Ring::queue(Chunk& chunk, const Read* reads, int64_t count) try {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t done = 0; done < reads[i].length; done += slots_.each) {
            const Read part{reads[i].file, reads[i].offset + done,
                            std::min(slots_.each, reads[i].length - done), reads[i].to + done};
            queue_.push_back({part, &chunk});
            ++chunk.pending;
        }
} catch (...) {  // memory ran out
    for (; chunk.pending > 0; --chunk.pending) queue_.pop_back();
    throw;
}

int Ring::arrive(int number, cudaStream_t stream, Error* error) {
    if (number < 0 || number >= static_cast<int>(chunks_.size()))
        return refuse("the ring has no such chunk", number, error);
    Chunk& chunk = chunks_[static_cast<size_t>(number)];
    {
        std::unique_lock<std::mutex> hold(mutex_);
        arrived_.wait(hold, [&] { return chunk.pending == 0; });
        if (chunk.code != kDone) {
            *error = chunk.error;
            return chunk.code;
        }
    }
    if (const int code =
            failed(cudaEventRecord(chunk.copied, copies_), "the copies could not be marked", error))
        return code;
    return failed(cudaStreamWaitEvent(stream, chunk.copied, 0), "a stream could not wait", error);
}

int Ring::release(int number, cudaStream_t stream, Error* error) {
    if (number < 0 || number >= static_cast<int>(chunks_.size()))
        return refuse("the ring has no such chunk", number, error);
    return failed(cudaEventRecord(chunks_[static_cast<size_t>(number)].released, stream),
                  "the chunk could not be released", error);
}

// One segment of a chunk is done with, or has failed; the lock is held.
void Ring::settle(Chunk& chunk, int code, const Error& error) {
    if (code != kDone && chunk.code == kDone) {
        chunk.code = code;
        chunk.error = error;
    }
    if (--chunk.pending == 0) arrived_.notify_all();
}

void Ring::serve_reads() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
        work_.wait(hold, [&] { return closing_ || (!queue_.empty() && !free_.empty()); });
        if (closing_) return;
        const Segment segment = queue_.front();
        queue_.pop_front();
        if (segment.chunk->code != kDone) {
            settle(*segment.chunk, kDone, {});
            continue;
        }
        const int64_t slot = free_.back();
        free_.pop_back();
        hold.unlock();
        Error error{};
        const int code = read(segment.read, at(slot), &error);
        hold.lock();
        if (code == kDone) {
            full_.push_back({segment, slot});
            ++waiting_;
            full_now_.notify_one();
        } else {
            free_.push_back(slot);
            work_.notify_one();
            settle(*segment.chunk, code, error);
        }
    }
}

void Ring::serve_copies() {
    const cudaError_t usable = cudaSetDevice(device_);
    for (;;) {
        {
            std::unique_lock<std::mutex> hold(mutex_);
            full_now_.wait(hold, [&] { return closing_ || !full_.empty() || !flying_.empty(); });
            if (closing_) return;
            std::swap(batch_, full_);
            waiting_ = 0;
        }
        for (; !batch_.empty(); batch_.pop_front()) {
            const Full& full = batch_.front();
            Error error{};
            int code = failed(usable, "the copying thread cannot use the card", &error);
            if (code == kDone) code = copy(full, &error);
            flying_.push_back(full.slot);
            std::lock_guard<std::mutex> hold(mutex_);
            settle(*full.segment.chunk, code, error);
        }
        land();
        if (landed_.empty()) continue;
        std::lock_guard<std::mutex> hold(mutex_);
        free_.insert(free_.end(), landed_.begin(), landed_.end());
        work_.notify_all();
    }
}

// Finds slots whose copies are done. Looks again and again while there is nothing else to do: a copy
// takes microseconds, and sleeping until the oldest is done would leave the bus idle before the next.
void Ring::land() {
    landed_.clear();
    while (!flying_.empty()) {
        // A failed copy is no longer under way: the next wait on its stream says what it was.
        if (cudaEventQuery(copied_[static_cast<size_t>(flying_.front())]) == cudaErrorNotReady) {
            if (!landed_.empty() || waiting_.load(std::memory_order_relaxed) > 0) break;
            std::this_thread::yield();
            continue;
        }
        landed_.push_back(flying_.front());
        flying_.pop_front();
    }
}

int Ring::copy(const Full& full, Error* error) {
    const Read& read = full.segment.read;
    if (const int code = failed(
            cudaMemcpyAsync(read.to, at(full.slot), static_cast<size_t>(read.length),
                            cudaMemcpyHostToDevice, copies_),
            "a copy to the card failed", error))
        return code;
    return failed(cudaEventRecord(copied_[static_cast<size_t>(full.slot)], copies_),
                  "a copy could not be marked", error);
}

int Ring::read(const Read& read, uint8_t* slot, Error* error) {
    for (int64_t done = 0; done < read.length;) {
        const ssize_t got = pread(read.file, slot + done, static_cast<size_t>(read.length - done),
                                  read.offset + done);
        if (got > 0) {
            done += got;
        } else if (got == 0 || errno != EINTR) {
            const int reason = got < 0 ? errno : 0;
            refuse("a read came up short", read.file, error);
            error->offset = read.offset;
            error->wanted = read.length;
            error->got = done;
            error->error = reason;
            return kFailedRead;
        }
    }
    return kDone;
}

}  // namespace qpn
