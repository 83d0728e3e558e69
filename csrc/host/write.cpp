#include "write.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "check.h"
#include "closing.h"
#include "metadata.h"
#include "pool.h"

namespace qpn {
namespace {

// One unit of work: rows [row, row + rows) of codes (of gate and up together where `second` is
// set), or a run of other pieces that lie together in the source.
struct Job {
    int64_t first, second;  // descriptors; second is -1 where there is none
    int64_t row, rows;
    int64_t count;  // pieces of a metadata run, 0 for codes
};

constexpr int64_t kRowsOfKn = 256;  // rows of one block: 4 KiB of each tile, both sources in L2
constexpr int64_t kRunBytes = 512 << 10;
constexpr int64_t kGapBytes = 4096;  // GAP_BYTES of loader/chunks.py

bool is_codes(const Descriptor& piece) { return piece.role == kCodesKn || piece.role == kCodesNk; }

int64_t end_of(const Descriptor& piece) { return piece.offset + piece.rows * piece.row_bytes; }

bool pairs(const Descriptor& gate, const Descriptor& up) {
    return gate.role == up.role && gate.rows == up.rows && gate.cols == up.cols &&
           gate.row_bytes == up.row_bytes && gate.dest_row == up.dest_row && gate.slot == up.slot;
}

class Planner {
   public:
    Planner(const Descriptor* pieces, int64_t count, const Layer& layer, int64_t buffer_bytes)
        : pieces_(pieces), count_(count), layer_(layer), buffer_bytes_(buffer_bytes) {}

    std::vector<Job> jobs() {
        find_pairs();
        for (int64_t i = 0; i < count_; ++i)
            if (is_codes(pieces_[i])) {
                if (partner_[i] >= 0 || pieces_[i].projection != 1 || !taken_[i]) codes(i);
            } else {
                i = run(i);
            }
        return jobs_;
    }

   private:
    // Gate and up of one expert that this chunk holds both: each line of the bank is written once.
    void find_pairs() {
        partner_.assign(count_, -1);
        taken_.assign(count_, false);
        std::vector<int64_t> waiting[2];
        for (auto& one : waiting) one.assign(layer_.bank[0].experts, -1);
        for (int64_t i = 0; i < count_; ++i) {
            if (!is_codes(pieces_[i]) || pieces_[i].bank != 0) continue;
            const int64_t own = pieces_[i].projection, other = waiting[1 - own][pieces_[i].slot];
            if (other >= 0 && pairs(pieces_[other], pieces_[i])) {
                const int64_t gate = own == 0 ? i : other, up = own == 0 ? other : i;
                partner_[gate] = up;
                taken_[up] = true;
                waiting[1 - own][pieces_[i].slot] = -1;
            } else {
                waiting[own][pieces_[i].slot] = i;
            }
        }
    }

    void codes(int64_t i) {
        const Descriptor& piece = pieces_[i];
        const bool kn = piece.role == kCodesKn;
        const int64_t sources = partner_[i] >= 0 ? 2 : 1;
        const int64_t quantum = kn ? 8 : kTile / layer_.bank[piece.bank].projections;
        const int64_t fit = buffer_bytes_ / sources / piece.row_bytes / quantum * quantum;
        const int64_t most = kn ? kRowsOfKn : std::max(kRunBytes / piece.row_bytes / quantum, int64_t{1}) * quantum;
        const int64_t rows = std::max(std::min(fit, most), quantum);
        for (int64_t row = 0; row < piece.rows; row += rows)
            jobs_.push_back({i, partner_[i], row, std::min(rows, piece.rows - row), 0});
    }

    // Neighbouring pieces other than codes are read together.
    int64_t run(int64_t i) {
        const int64_t most = std::min(kRunBytes, buffer_bytes_);
        int64_t last = i, end = end_of(pieces_[i]);
        while (last + 1 < count_ && !is_codes(pieces_[last + 1]) &&
               pieces_[last + 1].offset >= pieces_[i].offset &&
               pieces_[last + 1].offset <= end + kGapBytes &&
               std::max(end, end_of(pieces_[last + 1])) - pieces_[i].offset <= most) {
            ++last;
            end = std::max(end, end_of(pieces_[last]));
        }
        jobs_.push_back({i, -1, 0, 0, last - i + 1});
        return last;
    }

    const Descriptor* pieces_;
    const int64_t count_;
    const Layer& layer_;
    const int64_t buffer_bytes_;
    std::vector<int64_t> partner_;
    std::vector<bool> taken_;
    std::vector<Job> jobs_;
};

class Runner {
   public:
    Runner(const Source& source, const Descriptor* pieces, const Layer& layer,
           const CodesKernels& kernels, uint8_t* buffers, int64_t buffer_bytes)
        : source_(source),
          pieces_(pieces),
          layer_(layer),
          kernels_(kernels),
          buffers_(buffers),
          buffer_bytes_(buffer_bytes) {}

    void run(const Job& job, int worker) {
        if (failed_.load(std::memory_order_relaxed)) return;
        if (job.count == 0)
            codes(job, worker);
        else
            metadata(job, worker);
    }

    Failure failure;
    std::vector<Finding> findings;

   private:
    // Bytes [offset, offset + length) of the source, at `place` in this worker's buffer if read.
    const uint8_t* bytes(int64_t offset, int64_t length, int worker, int64_t place) {
        if (source_.memory != nullptr) return source_.memory + offset;
        uint8_t* into = buffers_ + worker * buffer_bytes_ + place;
        if (place + length > buffer_bytes_) return fail("a read is larger than its buffer", offset, length, 0, 0);
        for (int64_t done = 0; done < length;) {
            const ssize_t got = pread(source_.file, into + done, static_cast<size_t>(length - done), offset + done);
            if (got > 0)
                done += got;
            else if (got == 0 || errno != EINTR)
                return fail("a read came up short", offset, length, done, got < 0 ? errno : 0);
        }
        return into;
    }

    const uint8_t* fail(const char* what, int64_t offset, int64_t wanted, int64_t got, int error) {
        std::lock_guard<std::mutex> hold(mutex_);
        if (failure.what.empty()) failure = {what, -1, offset, wanted, got, error};
        failed_ = true;
        return nullptr;
    }

    void codes(const Job& job, int worker) {
        const Descriptor& piece = pieces_[job.first];
        const Bank& bank = layer_.bank[piece.bank];
        const int64_t length = job.rows * piece.row_bytes, skipped = job.row * piece.row_bytes;
        CodesBlock block{};
        block.first = bytes(piece.offset + skipped, length, worker, 0);
        if (block.first == nullptr) return;
        block.first += piece.skip;
        if (job.second >= 0) {
            const Descriptor& up = pieces_[job.second];
            block.second = bytes(up.offset + skipped, length, worker, length);
            if (block.second == nullptr) return;
            block.second += up.skip;
        }
        block.row_bytes = piece.row_bytes;
        block.rows = job.rows;
        block.words = piece.cols / 8;
        block.dest = reinterpret_cast<uint32_t*>(bank.tensor[0]) + piece.slot * bank.expert_words();
        block.tile_words = bank.tile_words();
        block.projections = static_cast<int>(bank.projections);
        block.parity = bank.projections == 2 ? static_cast<int>(piece.projection) : 0;
        if (piece.role == kCodesKn) {
            block.row0 = (piece.dest_row + job.row) / kRowsPerWord;
            kernels_.kn(block);
        } else {
            block.row0 = piece.dest_row + job.row;
            kernels_.nk(block);
        }
    }

    void metadata(const Job& job, int worker) {
        const int64_t begin = pieces_[job.first].offset;
        int64_t end = begin;
        for (int64_t i = job.first; i < job.first + job.count; ++i) end = std::max(end, end_of(pieces_[i]));
        if (source_.memory == nullptr && end - begin > buffer_bytes_) return rows_of(job.first, worker);
        const uint8_t* data = bytes(begin, end - begin, worker, 0);
        if (data == nullptr) return;
        for (int64_t i = job.first; i < job.first + job.count; ++i) {
            Findings found;
            write_metadata(pieces_[i], data + (pieces_[i].offset - begin), layer_, found);
            keep(i, found);
        }
    }

    // A lone piece larger than the buffer, some rows at a time.
    void rows_of(int64_t i, int worker) {
        Descriptor part = pieces_[i];
        const int64_t each = std::max(buffer_bytes_ / part.row_bytes, int64_t{1});
        for (int64_t row = 0; row < pieces_[i].rows; row += each) {
            part.rows = std::min(each, pieces_[i].rows - row);
            part.dest_row = pieces_[i].dest_row + row * row_features(part.role);
            const uint8_t* data = bytes(pieces_[i].offset + row * part.row_bytes, part.rows * part.row_bytes, worker, 0);
            if (data == nullptr) return;
            Findings found;
            write_metadata(part, data, layer_, found);
            keep(i, found);
        }
    }

    void keep(int64_t subject, const Findings& found) {
        if (found.count == 0) return;
        std::lock_guard<std::mutex> hold(mutex_);
        for (int f = 0; f < found.count; ++f) {
            findings.push_back(found.found[f]);
            findings.back().subject = subject;
        }
    }

    const Source& source_;
    const Descriptor* pieces_;
    const Layer& layer_;
    const CodesKernels& kernels_;
    uint8_t* buffers_;
    const int64_t buffer_bytes_;
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
};

void sort(std::vector<Finding>& findings) {
    std::sort(findings.begin(), findings.end(), [](const Finding& a, const Finding& b) {
        return a.subject != b.subject ? a.subject < b.subject : a.kind < b.kind;
    });
}

}  // namespace

Failure write(const Source& source, const Descriptor* pieces, int64_t count, const Layer& layer,
              const CodesKernels& kernels, int threads, uint8_t* buffers, int64_t buffer_bytes,
              std::vector<Finding>& findings) {
    Failure failure;
    failure.what = check_layer(layer, true);
    for (int64_t i = 0; failure.what.empty() && i < count; ++i) {
        failure.what = check_descriptor(pieces[i], layer, source.bytes);
        failure.subject = i;
    }
    if (!failure.what.empty()) return failure;
    const int64_t room = source.memory != nullptr ? int64_t{1} << 40 : buffer_bytes;
    const std::vector<Job> jobs = Planner(pieces, count, layer, room).jobs();
    Runner runner(source, pieces, layer, kernels, buffers, buffer_bytes);
    parallel(threads, static_cast<int64_t>(jobs.size()),
             [&](int64_t n, int worker) { runner.run(jobs[n], worker); });
    findings = std::move(runner.findings);
    sort(findings);
    return runner.failure;
}

Failure finish(const Layer& layer, int threads, std::vector<Finding>& findings) {
    Failure failure;
    failure.what = check_layer(layer, true);
    if (!failure.what.empty()) return failure;
    std::mutex mutex;
    const int64_t experts = layer.bank[0].experts;
    parallel(threads, 2 * experts, [&](int64_t n, int) {
        Findings found;
        finish_expert(layer, static_cast<int>(n / experts), n % experts, found);
        std::lock_guard<std::mutex> hold(mutex);
        for (int f = 0; f < found.count; ++f) {
            findings.push_back(found.found[f]);
            findings.back().subject = n;
        }
    });
    sort(findings);
    return failure;
}

}  // namespace qpn
