// The staging ring of one load to a card: threads read files into host slots, and one more copies
// each full slot into its chunk on the card. Only that one speaks to CUDA: sixteen that do so wait
// for one another, and for whoever launches kernels.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "../host/error.h"

namespace qpn {

struct Slots {
    uint8_t* base;  // host memory, pinned or not
    int64_t each;   // bytes of one slot
    int64_t count;
};

// One contiguous read: a descriptor that stays open until the chunk has arrived, and where the bytes
// go on the card.
struct Read {
    int file;
    int64_t offset, length;
    uint8_t* to;
};

// First in, first out, with room for so many from the start: the threads of a ring allocate nothing,
// since nobody would hear of an exception in them.
template <class T>
class Fifo {
   public:
    void make_room(size_t most) { places_.resize(most); }
    bool empty() const { return count_ == 0; }
    const T& front() const { return places_[first_]; }
    void push_back(const T& one) { places_[(first_ + count_++) % places_.size()] = one; }
    void pop_front() {
        first_ = (first_ + 1) % places_.size();
        --count_;
    }

   private:
    std::vector<T> places_;
    size_t first_ = 0, count_ = 0;
};

class Ring {
   public:
    // `error` and the code say what could not be made. May throw std::bad_alloc, as `submit` may.
    int open(int device, const Slots& slots, int threads, int chunks, Error* error);
    ~Ring();

    // Begins the reads of a chunk, all of them or none; its memory on the card is written after what
    // `release` marked.
    int submit(int chunk, const Read* reads, int64_t count, Error* error);
    // Blocks until every read of the chunk is done and its copies are enqueued; `stream` then waits
    // for the copies.
    int arrive(int chunk, cudaStream_t stream, Error* error);
    // What is on `stream` by now is the last use of the chunk's memory.
    int release(int chunk, cudaStream_t stream, Error* error);

   private:
    struct Chunk {
        cudaEvent_t copied = nullptr, released = nullptr;
        int64_t pending = 0;
        int code = kDone;
        Error error{};
    };
    struct Segment {
        Read read;
        Chunk* chunk;
    };

    struct Full {
        Segment segment;
        int64_t slot;
    };

    int make_events(Error* error);
    int start(int threads, Error* error);
    void queue(Chunk& chunk, const Read* reads, int64_t count);
    void serve_reads();
    void serve_copies();
    int copy(const Full& full, Error* error);
    void land();
    void settle(Chunk& chunk, int code, const Error& error);
    uint8_t* at(int64_t slot) const { return slots_.base + slot * slots_.each; }
    static int read(const Read& read, uint8_t* slot, Error* error);

    int device_ = 0;
    Slots slots_{};
    cudaStream_t copies_ = nullptr;
    std::vector<Chunk> chunks_;
    std::vector<cudaEvent_t> copied_;  // of each slot
    std::vector<std::thread> threads_;
    std::mutex mutex_;  // of all below, and of the chunks
    std::condition_variable work_, full_now_, arrived_;
    std::deque<Segment> queue_;   // to be read
    std::vector<int64_t> free_;   // slots
    Fifo<Full> full_;             // read, to be copied
    std::atomic<int64_t> waiting_{0};  // of them, so that they can be seen without the lock
    bool closing_ = false;

    // Of the copying thread alone:
    Fifo<Full> batch_;             // being copied
    Fifo<int64_t> flying_;         // slots whose copies are under way, oldest first
    std::vector<int64_t> landed_;  // slots whose copies are done
};

}  // namespace qpn
