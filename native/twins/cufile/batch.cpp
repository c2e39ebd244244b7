// Implements cuFileBatchIO*. A program submits many transfers to a batch by one call. A thread of the batch carries
// them out one after the other, and the program collects their results by cuFileBatchIOGetStatus.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
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

// Type of batch handles in the ledger of live handles (model/ledger.hpp).
constexpr std::string_view batch_ledger_kind = "cufile_batch";

struct Batch {
    std::mutex mutex;
    std::condition_variable entry_ended; // notified when an entry has ended
    unsigned capacity = 0;               // largest number of unfinished entries and `completed_events` together
    std::deque<IoParameters> pending_entries;
    // The entry that the worker has dequeued but not started. Between the two steps it waits for a random delay
    // and for a delay of the fault plan. In this time cuFileBatchIOCancel can remove the entry.
    std::optional<IoParameters> dequeued_entry;
    bool is_transferring = false; // the worker is transferring the bytes of an entry
    bool has_worker = false;
    std::deque<IoEvent> completed_events; // events of ended entries that were not yet returned to the program

    // The caller of the following functions holds `mutex`.
    [[nodiscard]] std::size_t count_unfinished() const {
        return pending_entries.size() + (dequeued_entry ? 1 : 0) + (is_transferring ? 1 : 0);
    }
    // Store the result of an entry: a number of bytes, -errno or a negative CUfileOpError.
    void finish(const IoParameters& parameters, IoStatus status, ssize_t result) {
        completed_events.push_back({parameters.cookie, status, static_cast<std::size_t>(result)});
        entry_ended.notify_all();
    }
};
using BatchRef = std::shared_ptr<Batch>;

struct Batches {
    std::mutex mutex;
    std::map<std::uint64_t, BatchRef> batch_by_handle;
};

Batches& batches() {
    static auto* const instance = new Batches;
    return *instance;
}

BatchRef find_batch(BatchHandle handle) {
    Batches& batch_table = batches();
    std::lock_guard lock(batch_table.mutex);
    const auto entry = batch_table.batch_by_handle.find(reinterpret_cast<std::uint64_t>(handle));
    if (entry == batch_table.batch_by_handle.end()) {
        throw CufileError{invalid_value};
    }
    return entry->second;
}

Transfer make_transfer(const IoParameters& parameters) {
    return {CallType::batch,
            parameters.opcode == opcode_write,
            parameters.file,
            parameters.batch.buffer,
            parameters.batch.length_bytes,
            parameters.batch.file_offset,
            parameters.batch.buffer_offset};
}

// Transfer the bytes of the dequeued entry, unless the entry is canceled in the delay before its start. The caller
// holds `lock`. This function releases the lock during the delay and the transfer.
void run_dequeued_entry(const BatchRef& batch, std::unique_lock<std::mutex>* lock) {
    lock->unlock();
    sleep_random_delay();
    const std::optional<int> injected_code = find_injected_fault("cufile.batch_io");
    lock->lock();
    if (!batch->dequeued_entry) {
        return;
    }
    const IoParameters parameters = *batch->dequeued_entry;
    batch->dequeued_entry.reset();
    batch->is_transferring = true;
    lock->unlock();
    const ssize_t result = injected_code ? -*injected_code : run_transfer_without_throwing(make_transfer(parameters));
    lock->lock();
    batch->is_transferring = false;
    batch->finish(parameters, result < 0 ? io_failed : io_complete, result);
}

void run_worker(const BatchRef& batch) {
    std::unique_lock lock(batch->mutex);
    while (!batch->pending_entries.empty()) {
        batch->dequeued_entry = batch->pending_entries.front();
        batch->pending_entries.pop_front();
        run_dequeued_entry(batch, &lock);
    }
    batch->has_worker = false;
    // The twin counts one completion each time that the worker has emptied the queue.
    count_operation(&StatsLevel1::batch_complete_ops, true);
}

// Cancel the entries that have not started. A transfer that is in progress goes on.
void cancel_waiting_entries(Batch* batch) {
    std::lock_guard lock(batch->mutex);
    if (batch->dequeued_entry) {
        batch->finish(*batch->dequeued_entry, io_canceled, 0);
        batch->dequeued_entry.reset();
    }
    for (const IoParameters& parameters : batch->pending_entries) {
        batch->finish(parameters, io_canceled, 0);
    }
    batch->pending_entries.clear();
}

void check_parameters(const IoParameters& parameters) {
    if (parameters.mode != mode_batch || parameters.batch.buffer == nullptr || parameters.batch.file_offset < 0 ||
        parameters.batch.buffer_offset < 0 || (parameters.opcode != opcode_read && parameters.opcode != opcode_write)) {
        throw CufileError{invalid_value};
    }
    find_file(parameters.file); // throws if the handle is invalid
}

// Convert a timeout. Return nullopt for a null pointer, which means no time limit.
std::optional<std::chrono::nanoseconds> parse_timeout(const timespec* timeout) {
    if (timeout == nullptr) {
        return std::nullopt;
    }
    if (timeout->tv_sec < 0 || timeout->tv_nsec < 0 || timeout->tv_nsec > 999'999'999) {
        throw CufileError{invalid_value};
    }
    return std::chrono::seconds(timeout->tv_sec) + std::chrono::nanoseconds(timeout->tv_nsec);
}

} // namespace

GDRKIT_CUFILE_ENTRY Error cuFileBatchIOSetUp(BatchHandle* handle, unsigned capacity) {
    const Error result = run_entry("cuFileBatchIOSetUp", [&] {
        require_open_driver();
        if (handle == nullptr || capacity == 0 || capacity > get_size_parameter(size_batch_entries)) {
            throw CufileError{invalid_value};
        }
        auto batch = std::make_shared<Batch>();
        batch->capacity = capacity;
        // The handle is a random non-canonical address, so that dereferencing the handle faults.
        const std::uint64_t handle_value = random_u64() >> 2 | std::uint64_t{1} << 62;
        Batches& batch_table = batches();
        std::lock_guard lock(batch_table.mutex);
        record_open_handle(batch_ledger_kind, handle_value);
        batch_table.batch_by_handle.emplace(handle_value, std::move(batch));
        *handle = reinterpret_cast<BatchHandle>(handle_value);
    });
    count_operation(&StatsLevel1::batch_setup_ops, result.error == success);
    return result;
}

GDRKIT_CUFILE_ENTRY Error cuFileBatchIOSubmit(BatchHandle handle, unsigned count, IoParameters* entries,
                                              unsigned flags) {
    const Error result = run_entry("cuFileBatchIOSubmit", [&] {
        require_open_driver();
        const BatchRef batch = find_batch(handle);
        if (count == 0 || entries == nullptr || flags != 0) {
            throw CufileError{invalid_value};
        }
        std::for_each(entries, entries + count, check_parameters);
        std::lock_guard lock(batch->mutex);
        if (count > batch->capacity - std::min<std::size_t>(batch->capacity, batch->count_unfinished() +
                                                                                 batch->completed_events.size())) {
            throw CufileError{batch_full};
        }
        batch->pending_entries.insert(batch->pending_entries.end(), entries, entries + count);
        if (!batch->has_worker) {
            batch->has_worker = true;
            // The thread is detached, because the fault plan may delay it until long after the batch is destroyed.
            start_signal_blocking_thread([batch] { run_worker(batch); }).detach();
        }
    });
    count_operation(&StatsLevel1::batch_submit_ops, result.error == success);
    return result;
}

// `count` is the capacity of `events` at the call, and the number of returned events afterwards.
GDRKIT_CUFILE_ENTRY Error cuFileBatchIOGetStatus(BatchHandle handle, unsigned count_min, unsigned* count,
                                                 IoEvent* events, timespec* timeout) {
    return run_entry("cuFileBatchIOGetStatus", [&] {
        require_open_driver();
        const BatchRef batch = find_batch(handle);
        if (count == nullptr || events == nullptr || count_min > *count) {
            throw CufileError{invalid_value};
        }
        const auto time_limit = parse_timeout(timeout);
        std::unique_lock lock(batch->mutex);
        // Also return if no entry is unfinished, because then no more results can come.
        const auto can_return = [&] {
            return batch->completed_events.size() >= count_min || batch->count_unfinished() == 0;
        };
        if (!time_limit) {
            batch->entry_ended.wait(lock, can_return);
        } else {
            batch->entry_ended.wait_for(lock, *time_limit, can_return);
        }
        const auto returned_count =
            static_cast<unsigned>(std::min<std::size_t>(*count, batch->completed_events.size()));
        std::copy_n(batch->completed_events.begin(), returned_count, events);
        batch->completed_events.erase(batch->completed_events.begin(),
                                      batch->completed_events.begin() + returned_count);
        *count = returned_count;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileBatchIOCancel(BatchHandle handle) {
    const Error result = run_entry("cuFileBatchIOCancel", [&] {
        require_open_driver();
        cancel_waiting_entries(find_batch(handle).get());
    });
    count_operation(&StatsLevel1::batch_cancel_ops, result.error == success);
    return result;
}

GDRKIT_CUFILE_ENTRY void cuFileBatchIODestroy(BatchHandle handle) {
    BatchRef batch;
    {
        Batches& batch_table = batches();
        std::lock_guard lock(batch_table.mutex);
        const auto handle_value = reinterpret_cast<std::uint64_t>(handle);
        if (!record_closed_handle(batch_ledger_kind, handle_value)) {
            // This function cannot report an error. It must not end the process, because NIXL destroys handles that it
            // has never set up. So it only prints a line.
            std::fprintf(stderr, "gdrkit twin: cuFileBatchIODestroy(%p): not a batch handle, or already destroyed\n",
                         handle);
            return;
        }
        batch = batch_table.batch_by_handle.extract(handle_value).mapped();
    }
    cancel_waiting_entries(batch.get());
    // Wait for the transfer that is in progress, because the caller may free its memory after this call.
    std::unique_lock lock(batch->mutex);
    batch->entry_ended.wait(lock, [&] { return !batch->is_transferring; });
    count_operation(&StatsLevel1::batch_destroy_ops, true);
}

} // namespace gdrkit::twin::cufile
