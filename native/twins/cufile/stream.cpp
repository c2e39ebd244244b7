// Reads and writes in the order of a CUDA stream.
#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
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

constexpr std::string_view kind = "cufile_stream";

struct Streams {
    std::mutex mutex;
    std::map<Stream, unsigned> registered;
};

Streams& streams() {
    static auto* const all = new Streams;
    return *all;
}

unsigned flags_of(Stream stream) {
    Streams& all = streams();
    std::lock_guard lock(all.mutex);
    const auto found = all.registered.find(stream);
    return found == all.registered.end() ? 0 : found->second;
}

// One transfer that waits for its turn. What is not fixed by the flags of the stream is read when the turn comes.
struct Queued {
    AtWork at_work;
    bool writing = false;
    FileHandle file = nullptr;
    void* buffer = nullptr;
    const std::size_t* length_bytes = nullptr;
    const off_t* file_offset = nullptr;
    const off_t* buffer_offset = nullptr;
    ssize_t* result = nullptr;
    std::size_t fixed_length_bytes = 0;
    off_t fixed_file_offset = 0, fixed_buffer_offset = 0;
    std::size_t length_bytes_most = 0;
};

ssize_t done_now(const Queued& queued) {
    if (const auto code = hit("cufile.async_io")) {
        return -*code;
    }
    const Transfer transfer{Call::stream,         queued.writing,      queued.file,          queued.buffer,
                            *queued.length_bytes, *queued.file_offset, *queued.buffer_offset};
    return transfer.length_bytes > queued.length_bytes_most ? -invalid_value : answer_of(transfer);
}

// Called by the stream, where no call of the driver is allowed: another thread does the work, and the stream waits.
void in_turn(void* data) {
    const std::unique_ptr<Queued> queued(static_cast<Queued*>(data));
    std::thread worker = start_quiet_thread([&queued] {
        be_late();
        *queued->result = done_now(*queued);
    });
    worker.join();
}

Error queue(std::string_view symbol, bool writing, FileHandle file, void* buffer, std::size_t* length_bytes,
            off_t* file_offset, off_t* buffer_offset, ssize_t* result, Stream stream) {
    return entry(symbol, [&] {
        require_open();
        if (buffer == nullptr || length_bytes == nullptr || file_offset == nullptr || buffer_offset == nullptr ||
            result == nullptr) {
            throw Refused{invalid_value};
        }
        find_file(file);
        const Place place = place_of_stream(stream);
        // Written at once, so that it does not tell what is done from what is not; and where no context is current, the
        // driver refuses what the real one asks of it here, and the call succeeds (both seen with 1.15 and 1.20).
        *result = has_current_context() ? 0 : -ENOMEM;
        if (*result != 0) {
            return;
        }
        const unsigned flags = flags_of(stream);
        auto queued = std::make_unique<Queued>();
        queued->writing = writing;
        queued->file = file;
        queued->buffer = buffer;
        queued->result = result;
        queued->fixed_length_bytes = *length_bytes;
        queued->fixed_file_offset = *file_offset;
        queued->fixed_buffer_offset = *buffer_offset;
        queued->length_bytes_most = *length_bytes;
        queued->length_bytes = (flags & fixed_file_size) != 0 ? &queued->fixed_length_bytes : length_bytes;
        queued->file_offset = (flags & fixed_file_offset) != 0 ? &queued->fixed_file_offset : file_offset;
        queued->buffer_offset = (flags & fixed_buffer_offset) != 0 ? &queued->fixed_buffer_offset : buffer_offset;
        launch_on(place, stream, in_turn, queued.get());
        static_cast<void>(queued.release());
    });
}

} // namespace

GDRKIT_CUFILE_ENTRY Error cuFileReadAsync(FileHandle file, void* buffer, std::size_t* length_bytes, off_t* file_offset,
                                          off_t* buffer_offset, ssize_t* result, Stream stream) {
    return queue("cuFileReadAsync", false, file, buffer, length_bytes, file_offset, buffer_offset, result, stream);
}

GDRKIT_CUFILE_ENTRY Error cuFileWriteAsync(FileHandle file, void* buffer, std::size_t* length_bytes, off_t* file_offset,
                                           off_t* buffer_offset, ssize_t* result, Stream stream) {
    return queue("cuFileWriteAsync", true, file, buffer, length_bytes, file_offset, buffer_offset, result, stream);
}

GDRKIT_CUFILE_ENTRY Error cuFileStreamRegister(Stream stream, unsigned flags) {
    return entry("cuFileStreamRegister", [&] {
        require_open();
        if ((flags & ~static_cast<unsigned>(stream_flags_mask)) != 0) {
            throw Refused{invalid_value};
        }
        place_of_stream(stream);
        Streams& all = streams();
        std::lock_guard lock(all.mutex);
        if (!all.registered.emplace(stream, flags).second) {
            throw Refused{invalid_value};
        }
        ledger_add(kind, stream);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileStreamDeregister(Stream stream) {
    return entry("cuFileStreamDeregister", [&] {
        require_open();
        Streams& all = streams();
        std::lock_guard lock(all.mutex);
        if (!ledger_remove(kind, stream)) {
            throw Refused{invalid_value};
        }
        all.registered.erase(stream);
    });
}

} // namespace gdrkit::twin::cufile
