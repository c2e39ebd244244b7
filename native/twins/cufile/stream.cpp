// Implements cuFileReadAsync and cuFileWriteAsync, which transfer in the order of a CUDA stream, and the registration
// of streams.
#include <algorithm>
#include <cerrno>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "cufile/cuda.hpp"
#include "cufile/driver.hpp"
#include "cufile/entry.hpp"
#include "cufile/files.hpp"
#include "cufile/transfer.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/ledger.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::cufile {
namespace {

// Type of registered streams in the ledger of live handles (model/ledger.hpp).
constexpr std::string_view stream_ledger_kind = "cufile_stream";

// A transfer that was queued and is not complete. The twin keeps the list of these transfers to emulate an error of the
// real library with concurrent transfers (mix_up_bytes in transfer.cpp).
struct UnfinishedTransfer {
    Stream stream = 0;
    const void* buffer = nullptr;
    TransferRange range;
};

struct Streams {
    std::mutex mutex;
    std::map<Stream, unsigned> flags_by_stream;         // registered streams only
    std::list<UnfinishedTransfer> unfinished_transfers; // oldest first
};

Streams& streams() {
    static auto* const instance = new Streams;
    return *instance;
}

// Return the flags with which the stream was registered, or 0 if it is not registered.
unsigned get_registered_flags(Stream stream) {
    Streams& stream_table = streams();
    std::lock_guard lock(stream_table.mutex);
    const auto registration = stream_table.flags_by_stream.find(stream);
    return registration == stream_table.flags_by_stream.end() ? 0 : registration->second;
}

// An object that keeps a transfer in the list of unfinished transfers during its lifetime.
class UnfinishedEntry {
public:
    explicit UnfinishedEntry(const UnfinishedTransfer& transfer) {
        Streams& stream_table = streams();
        std::lock_guard lock(stream_table.mutex);
        const auto concurrent_transfer =
            std::ranges::find_if(stream_table.unfinished_transfers, [&](const UnfinishedTransfer& unfinished) {
                return unfinished.buffer == transfer.buffer && unfinished.stream != transfer.stream;
            });
        if (concurrent_transfer != stream_table.unfinished_transfers.end()) {
            concurrent_range_ = concurrent_transfer->range;
        }
        entry_ = stream_table.unfinished_transfers.insert(stream_table.unfinished_transfers.end(), transfer);
    }
    UnfinishedEntry(const UnfinishedEntry&) = delete;
    UnfinishedEntry& operator=(const UnfinishedEntry&) = delete;
    ~UnfinishedEntry() {
        Streams& stream_table = streams();
        std::lock_guard lock(stream_table.mutex);
        stream_table.unfinished_transfers.erase(entry_);
    }

    // Return the range of a transfer of another stream that used the same buffer and was unfinished when this transfer
    // was queued. If there were several, return the range of the oldest; if there was none, return nullopt.
    [[nodiscard]] const std::optional<TransferRange>& concurrent_range() const { return concurrent_range_; }

private:
    std::list<UnfinishedTransfer>::iterator entry_;
    std::optional<TransferRange> concurrent_range_;
};

// A queued transfer. The pointers length_bytes, file_offset and buffer_offset are read when the transfer starts. They
// point to variables of the program, or to submitted_range for arguments that the stream's flags declare as fixed.
struct QueuedTransfer {
    OperationInProgress operation_in_progress; // keeps the cuFile driver from being closed before the transfer is done
    std::optional<UnfinishedEntry> unfinished_entry;
    bool is_write = false;
    void* buffer = nullptr;
    const std::size_t* length_bytes = nullptr;
    const off_t* file_offset = nullptr;
    const off_t* buffer_offset = nullptr;
    ssize_t* result = nullptr;
    TransferRange submitted_range; // the arguments at the call of cuFileReadAsync or cuFileWriteAsync
    std::uint64_t properties_call_count = cufile::count_properties_calls();
};

ssize_t run_queued_transfer(const QueuedTransfer& queued_transfer) {
    if (const auto code = find_injected_fault("cufile.async_io")) {
        return -*code;
    }
    const Transfer transfer{CallType::stream,
                            queued_transfer.is_write,
                            queued_transfer.submitted_range.file,
                            queued_transfer.buffer,
                            *queued_transfer.length_bytes,
                            *queued_transfer.file_offset,
                            *queued_transfer.buffer_offset,
                            queued_transfer.unfinished_entry->concurrent_range(),
                            queued_transfer.properties_call_count};
    // Until the transfer starts, the program may make the length smaller, but not larger.
    return transfer.length_bytes > queued_transfer.submitted_range.length_bytes
               ? -invalid_value
               : run_transfer_without_throwing(transfer);
}

// Run a queued transfer as a host function of the stream. A host function must not call the CUDA driver. So another
// thread carries out the transfer, and the stream waits for that thread.
void run_in_stream(void* argument) {
    const std::unique_ptr<QueuedTransfer> queued_transfer(static_cast<QueuedTransfer*>(argument));
    std::thread worker = start_signal_blocking_thread([&queued_transfer] {
        sleep_random_delay();
        *queued_transfer->result = run_queued_transfer(*queued_transfer);
    });
    worker.join();
}

Error queue_transfer(std::string_view symbol, bool is_write, FileHandle file, void* buffer, std::size_t* length_bytes,
                     off_t* file_offset, off_t* buffer_offset, ssize_t* result, Stream stream) {
    return run_entry(symbol, [&] {
        require_open_driver();
        if (buffer == nullptr || length_bytes == nullptr || file_offset == nullptr || buffer_offset == nullptr ||
            result == nullptr) {
            throw CufileError{invalid_value};
        }
        find_file(file); // throws if the handle is invalid
        const MemoryLocation location = find_location_of_stream(stream);
        // The result is 0 until the transfer is done. Without a current context the real library returns success, but
        // stores the result -ENOMEM and queues no transfer (observed with 1.15 and 1.20).
        *result = has_current_context() ? 0 : -ENOMEM;
        if (*result != 0) {
            return;
        }
        const unsigned flags = get_registered_flags(stream);
        auto queued_transfer = std::make_unique<QueuedTransfer>();
        queued_transfer->is_write = is_write;
        queued_transfer->buffer = buffer;
        queued_transfer->result = result;
        queued_transfer->submitted_range = {file, *length_bytes, *file_offset, *buffer_offset};
        queued_transfer->unfinished_entry.emplace(UnfinishedTransfer{stream, buffer, queued_transfer->submitted_range});
        const TransferRange& submitted_range = queued_transfer->submitted_range;
        queued_transfer->length_bytes = (flags & fixed_file_size) != 0 ? &submitted_range.length_bytes : length_bytes;
        queued_transfer->file_offset = (flags & fixed_file_offset) != 0 ? &submitted_range.file_offset : file_offset;
        queued_transfer->buffer_offset =
            (flags & fixed_buffer_offset) != 0 ? &submitted_range.buffer_offset : buffer_offset;
        launch_host_function(location, stream, run_in_stream, queued_transfer.get());
        static_cast<void>(queued_transfer.release()); // run_in_stream deletes the object
    });
}

} // namespace

GDRKIT_CUFILE_ENTRY Error cuFileReadAsync(FileHandle file, void* buffer, std::size_t* length_bytes, off_t* file_offset,
                                          off_t* buffer_offset, ssize_t* result, Stream stream) {
    return queue_transfer("cuFileReadAsync", false, file, buffer, length_bytes, file_offset, buffer_offset, result,
                          stream);
}

GDRKIT_CUFILE_ENTRY Error cuFileWriteAsync(FileHandle file, void* buffer, std::size_t* length_bytes, off_t* file_offset,
                                           off_t* buffer_offset, ssize_t* result, Stream stream) {
    return queue_transfer("cuFileWriteAsync", true, file, buffer, length_bytes, file_offset, buffer_offset, result,
                          stream);
}

GDRKIT_CUFILE_ENTRY Error cuFileStreamRegister(Stream stream, unsigned flags) {
    return run_entry("cuFileStreamRegister", [&] {
        require_open_driver();
        if ((flags & ~static_cast<unsigned>(stream_flags_mask)) != 0) {
            throw CufileError{invalid_value};
        }
        static_cast<void>(find_location_of_stream(stream)); // throws if no device has this stream
        Streams& stream_table = streams();
        std::lock_guard lock(stream_table.mutex);
        if (!stream_table.flags_by_stream.emplace(stream, flags).second) {
            throw CufileError{invalid_value};
        }
        record_open_handle(stream_ledger_kind, stream);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileStreamDeregister(Stream stream) {
    return run_entry("cuFileStreamDeregister", [&] {
        require_open_driver();
        Streams& stream_table = streams();
        std::lock_guard lock(stream_table.mutex);
        if (!record_closed_handle(stream_ledger_kind, stream)) {
            throw CufileError{invalid_value};
        }
        stream_table.flags_by_stream.erase(stream);
    });
}

} // namespace gdrkit::twin::cufile
