// Batches: many transfers by one call, whose ends are asked for later.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cufile/driver.hpp"
#include "cufile/entry.hpp"
#include "cufile/files.hpp"
#include "cufile/parameters.hpp"
#include "cufile/transfer.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/ledger.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::cufile {
namespace {

constexpr std::string_view kind = "cufile_batch";

struct Batch {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned capacity = 0;
    std::deque<IoParameters> waiting;
    std::optional<IoParameters> held; // taken by the worker, not begun: a plan may hold it up for long
    bool running = false;             // the worker moves bytes
    bool has_worker = false;
    std::deque<IoEvent> done; // not asked for yet

    // With the lock held.
    [[nodiscard]] std::size_t not_done() const { return waiting.size() + (held ? 1 : 0) + (running ? 1 : 0); }
    void end(const IoParameters& io, IoStatus status, ssize_t result) {
        done.push_back({io.cookie, status, static_cast<std::size_t>(result)});
        changed.notify_all();
    }
};
using BatchRef = std::shared_ptr<Batch>;

struct Batches {
    std::mutex mutex;
    std::map<std::uint64_t, BatchRef> open;
};

Batches& batches() {
    static auto* const all = new Batches;
    return *all;
}

BatchRef find_batch(BatchHandle handle) {
    Batches& all = batches();
    std::lock_guard lock(all.mutex);
    const auto found = all.open.find(reinterpret_cast<std::uint64_t>(handle));
    if (found == all.open.end()) {
        throw Refused{invalid_value};
    }
    return found->second;
}

Transfer transfer_of(const IoParameters& io) {
    return {Call::batch,          io.opcode == opcode_write, io.file, io.batch.buffer, io.batch.length_bytes,
            io.batch.file_offset, io.batch.buffer_offset};
}

// The entry that was taken, once it is its turn, unless it was canceled while a plan held it up. With the lock held.
void run_held(const BatchRef& batch, std::unique_lock<std::mutex>* lock) {
    lock->unlock();
    be_late();
    const std::optional<int> planned = hit("cufile.batch_io");
    lock->lock();
    if (!batch->held) {
        return;
    }
    const IoParameters io = *batch->held;
    batch->held.reset();
    batch->running = true;
    lock->unlock();
    const ssize_t result = planned ? -*planned : answer_of(transfer_of(io));
    lock->lock();
    batch->running = false;
    batch->end(io, result < 0 ? io_failed : io_complete, result);
}

void work(const BatchRef& batch) {
    std::unique_lock lock(batch->mutex);
    while (!batch->waiting.empty()) {
        batch->held = batch->waiting.front();
        batch->waiting.pop_front();
        run_held(batch, &lock);
    }
    batch->has_worker = false;
    count_operation(&StatsLevel1::batch_complete_ops, true);
}

void cancel(Batch* batch) {
    std::lock_guard lock(batch->mutex);
    if (batch->held) {
        batch->end(*batch->held, io_canceled, 0);
        batch->held.reset();
    }
    for (const IoParameters& io : batch->waiting) {
        batch->end(io, io_canceled, 0);
    }
    batch->waiting.clear();
}

void check(const IoParameters& io) {
    if (io.mode != mode_batch || io.batch.buffer == nullptr || io.batch.file_offset < 0 || io.batch.buffer_offset < 0 ||
        (io.opcode != opcode_read && io.opcode != opcode_write)) {
        throw Refused{invalid_value};
    }
    find_file(io.file);
}

std::optional<std::chrono::nanoseconds> patience_of(const timespec* timeout) {
    if (timeout == nullptr) {
        return std::nullopt;
    }
    if (timeout->tv_sec < 0 || timeout->tv_nsec < 0 || timeout->tv_nsec > 999'999'999) {
        throw Refused{invalid_value};
    }
    return std::chrono::seconds(timeout->tv_sec) + std::chrono::nanoseconds(timeout->tv_nsec);
}

} // namespace

GDRKIT_CUFILE_ENTRY Error cuFileBatchIOSetUp(BatchHandle* handle, unsigned capacity) {
    const Error result = entry("cuFileBatchIOSetUp", [&] {
        require_open();
        if (handle == nullptr || capacity == 0 || capacity > size_parameter(size_batch_entries)) {
            throw Refused{invalid_value};
        }
        auto batch = std::make_shared<Batch>();
        batch->capacity = capacity;
        const std::uint64_t number = random_u64() >> 2 | std::uint64_t{1} << 62;
        Batches& all = batches();
        std::lock_guard lock(all.mutex);
        ledger_add(kind, number);
        all.open.emplace(number, std::move(batch));
        *handle = reinterpret_cast<BatchHandle>(number);
    });
    count_operation(&StatsLevel1::batch_setup_ops, result.error == success);
    return result;
}

GDRKIT_CUFILE_ENTRY Error cuFileBatchIOSubmit(BatchHandle handle, unsigned count, IoParameters* entries,
                                              unsigned flags) {
    const Error result = entry("cuFileBatchIOSubmit", [&] {
        require_open();
        const BatchRef batch = find_batch(handle);
        if (count == 0 || entries == nullptr || flags != 0) {
            throw Refused{invalid_value};
        }
        std::for_each(entries, entries + count, check);
        std::lock_guard lock(batch->mutex);
        if (count > batch->capacity - std::min<std::size_t>(batch->capacity, batch->not_done() + batch->done.size())) {
            throw Refused{batch_full};
        }
        batch->waiting.insert(batch->waiting.end(), entries, entries + count);
        if (!batch->has_worker) {
            batch->has_worker = true;
            // Not waited for: a plan may hold it up long after the batch is gone.
            start_quiet_thread([batch] { work(batch); }).detach();
        }
    });
    count_operation(&StatsLevel1::batch_submit_ops, result.error == success);
    return result;
}

GDRKIT_CUFILE_ENTRY Error cuFileBatchIOGetStatus(BatchHandle handle, unsigned count_min, unsigned* count,
                                                 IoEvent* events, timespec* timeout) {
    return entry("cuFileBatchIOGetStatus", [&] {
        require_open();
        const BatchRef batch = find_batch(handle);
        if (count == nullptr || events == nullptr || count_min > *count) {
            throw Refused{invalid_value};
        }
        const auto patience = patience_of(timeout);
        std::unique_lock lock(batch->mutex);
        // Who waits for more than there is would wait for ever.
        const auto enough = [&] { return batch->done.size() >= count_min || batch->not_done() == 0; };
        if (!patience) {
            batch->changed.wait(lock, enough);
        } else {
            batch->changed.wait_for(lock, *patience, enough);
        }
        const auto given = static_cast<unsigned>(std::min<std::size_t>(*count, batch->done.size()));
        std::copy_n(batch->done.begin(), given, events);
        batch->done.erase(batch->done.begin(), batch->done.begin() + given);
        *count = given;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileBatchIOCancel(BatchHandle handle) {
    const Error result = entry("cuFileBatchIOCancel", [&] {
        require_open();
        cancel(find_batch(handle).get());
    });
    count_operation(&StatsLevel1::batch_cancel_ops, result.error == success);
    return result;
}

GDRKIT_CUFILE_ENTRY void cuFileBatchIODestroy(BatchHandle handle) {
    BatchRef batch;
    {
        Batches& all = batches();
        std::lock_guard lock(all.mutex);
        const auto number = reinterpret_cast<std::uint64_t>(handle);
        if (!ledger_remove(kind, number)) {
            std::fprintf(stderr, "gdrkit twin: cuFileBatchIODestroy(%p): no such batch\n", handle);
            std::abort();
        }
        batch = all.open.extract(number).mapped();
    }
    cancel(batch.get());
    // What moves bytes is waited for: afterwards the memory may be freed.
    std::unique_lock lock(batch->mutex);
    batch->changed.wait(lock, [&] { return !batch->running; });
    count_operation(&StatsLevel1::batch_destroy_ops, true);
}

} // namespace gdrkit::twin::cufile
