// Implements cuFileRead, cuFileWrite, cuFileReadv and cuFileWritev, and the transfers of batches and streams.

#include "cufile/transfer.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <memory>
#include <optional>

#include "cufile/buffers.hpp"
#include "cufile/cuda.hpp"
#include "cufile/driver.hpp"
#include "cufile/entry.hpp"
#include "cufile/files.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/usage.hpp"

namespace gdrkit::twin::cufile {
namespace {

// A direct transfer (p2p or nvfs) requires offsets and a length that are multiples of this number.
constexpr std::uint64_t direct_alignment_bytes = 4096;
// A transfer moves its bytes in chunks of at most this size, because a staging buffer holds one chunk.
constexpr std::size_t max_chunk_bytes = 1 << 20;

struct RouteChoice {
    Route route = Route::posix;
    bool is_unaligned = false;
};

// Choose the path that the statistics report for a transfer. The fault plan says which path the emulated machine
// supports. A transfer takes this path only if its alignment, its file, its memory and the settings of the driver
// permit it. Otherwise it takes the path through the host (posix). Throw CufileError (io_not_supported) if that path is
// needed but compat mode is not allowed.
RouteChoice choose_route(const Transfer& transfer, const File& file, const MemoryLocation& location) {
    const Route supported_route =
        static_cast<Route>(find_injected_fault("cufile.route").value_or(static_cast<int>(Route::posix)));
    const CompatSettings compat_settings = get_compat_settings();
    // A bit below the alignment is set if an offset or the length is unaligned.
    const auto combined_bits = static_cast<std::uint64_t>(transfer.file_offset) |
                               static_cast<std::uint64_t>(transfer.buffer_offset) | transfer.length_bytes;
    RouteChoice choice;
    choice.is_unaligned = combined_bits % direct_alignment_bytes != 0;
    if (location.is_device && file.is_direct && !choice.is_unaligned && !compat_settings.force_compat) {
        choice.route = supported_route;
    }
    if (choice.route == Route::posix && location.is_device && !compat_settings.allow_compat) {
        throw CufileError{io_not_supported};
    }
    return choice;
}

void check_arguments(const Transfer& transfer) {
    if (transfer.buffer == nullptr || transfer.file_offset < 0 || transfer.buffer_offset < 0 ||
        transfer.length_bytes > SSIZE_MAX ||
        transfer.length_bytes > static_cast<std::size_t>(LONG_MAX - transfer.file_offset) ||
        transfer.length_bytes > static_cast<std::size_t>(LONG_MAX - transfer.buffer_offset)) {
        throw CufileError{invalid_value};
    }
}

// Call pread or pwrite, again after EINTR. Return the result: a number of bytes, or -1 with errno set.
ssize_t pread_or_pwrite(const Transfer& transfer, int fd, void* memory, std::size_t length_bytes, off_t offset) {
    ssize_t moved_bytes = 0;
    do {
        moved_bytes =
            transfer.is_write ? pwrite(fd, memory, length_bytes, offset) : pread(fd, memory, length_bytes, offset);
    } while (moved_bytes < 0 && errno == EINTR);
    return moved_bytes;
}

// Transfer in chunks and return the number of bytes, or -1 with errno set. copy_chunk(transferred_bytes,
// chunk_length_bytes) moves the bytes after the first `transferred_bytes` and returns like pread. If some bytes were
// moved before an error, return their number, as pread does. The next call of the program then reports the error.
template <typename CopyChunk> ssize_t transfer_in_chunks(const Transfer& transfer, CopyChunk&& copy_chunk) {
    std::size_t transferred_bytes = 0;
    while (transferred_bytes < transfer.length_bytes) {
        const std::size_t chunk_length_bytes = std::min(max_chunk_bytes, transfer.length_bytes - transferred_bytes);
        const ssize_t moved_bytes = copy_chunk(transferred_bytes, chunk_length_bytes);
        if (moved_bytes < 0 && transferred_bytes == 0) {
            return -1;
        }
        if (moved_bytes <= 0) {
            break;
        }
        transferred_bytes += static_cast<std::size_t>(moved_bytes);
        if (static_cast<std::size_t>(moved_bytes) < chunk_length_bytes) {
            break;
        }
    }
    return static_cast<ssize_t>(transferred_bytes);
}

ssize_t transfer_device_memory(const Transfer& transfer, const File& file, const MemoryLocation& location) {
    const std::uint64_t device_address =
        reinterpret_cast<std::uint64_t>(transfer.buffer) + static_cast<std::uint64_t>(transfer.buffer_offset);
    const std::unique_ptr<char[]> staging_buffer(new char[std::min(max_chunk_bytes, transfer.length_bytes)]);
    const DeviceCopier copier(location);
    return transfer_in_chunks(transfer, [&](std::size_t transferred_bytes, std::size_t chunk_length_bytes) {
        const off_t offset = transfer.file_offset + static_cast<off_t>(transferred_bytes);
        if (transfer.is_write) {
            copier.copy_from_device(staging_buffer.get(), device_address + transferred_bytes, chunk_length_bytes);
            return pread_or_pwrite(transfer, file.buffered_fd.get(), staging_buffer.get(), chunk_length_bytes, offset);
        }
        const ssize_t moved_bytes =
            pread_or_pwrite(transfer, file.buffered_fd.get(), staging_buffer.get(), chunk_length_bytes, offset);
        if (moved_bytes > 0) {
            copier.copy_to_device(device_address + transferred_bytes, staging_buffer.get(),
                                  static_cast<std::size_t>(moved_bytes));
        }
        return moved_bytes;
    });
}

ssize_t transfer_host_memory(const Transfer& transfer, const File& file) {
    char* const host_address = static_cast<char*>(transfer.buffer) + transfer.buffer_offset;
    return transfer_in_chunks(transfer, [&](std::size_t transferred_bytes, std::size_t chunk_length_bytes) {
        return pread_or_pwrite(transfer, file.buffered_fd.get(), host_address + transferred_bytes, chunk_length_bytes,
                               transfer.file_offset + static_cast<off_t>(transferred_bytes));
    });
}

// In compat mode, if several streams use one registration at the same time, the real library (1.15) mixes up the bytes
// of their transfers. Emulate this error: overwrite bytes that this transfer has stored with bytes of the concurrent
// transfer. A read takes these bytes from the file range of the concurrent transfer, a write from the buffer range of
// the concurrent transfer.
void mix_up_bytes(const Transfer& transfer, const File& file, const MemoryLocation& location, std::size_t moved_bytes) {
    Transfer wrong_transfer = transfer;
    wrong_transfer.length_bytes = std::min(moved_bytes, transfer.concurrent_range->length_bytes);
    try {
        if (transfer.is_write) {
            wrong_transfer.buffer_offset = transfer.concurrent_range->buffer_offset;
            transfer_device_memory(wrong_transfer, file, location);
        } else if (const FileRef other_file = find_file(transfer.concurrent_range->file)) {
            wrong_transfer.file_offset = transfer.concurrent_range->file_offset;
            transfer_device_memory(wrong_transfer, *other_file, location);
        }
    } catch (const CufileError&) {
        // The concurrent transfer is invalid: it fails by itself and has no bytes to mix in.
    }
}

// Carry out a transfer, and store its device and path in the record. Return and throw like run_transfer.
ssize_t transfer_bytes(const Transfer& transfer, TransferRecord* record) {
    check_arguments(transfer);
    const FileRef file = find_file(transfer.file);
    if (!file) {
        errno = EBADF;
        return -1;
    }
    const auto base = reinterpret_cast<std::uint64_t>(transfer.buffer);
    const auto offset = static_cast<std::uint64_t>(transfer.buffer_offset);
    const MemoryLocation location = find_location(base);
    record->device = location.device_ordinal;
    const bool is_registered = check_registered(base, offset, transfer.length_bytes, location);
    if (location.is_device) {
        check_allocated(base + offset, transfer.length_bytes);
    }
    const RouteChoice choice = choose_route(transfer, *file, location);
    record->route = choice.route;
    record->is_unaligned = choice.is_unaligned;
    if (transfer.length_bytes == 0) {
        return 0;
    }
    const bool is_compat_stream_transfer = transfer.call_type == CallType::stream && choice.route == Route::posix;
    if (is_compat_stream_transfer && !is_registered && offset != 0) {
        errno = EIO; // observed with cuFile 1.15; only registered memory may have an offset
        return -1;
    }
    if (is_compat_stream_transfer && transfer.properties_call_count != count_properties_calls()) {
        errno = EIO; // observed with cuFile 1.15 for most transfers that are queued during cuFileDriverGetProperties
        return -1;
    }
    const ssize_t result =
        location.is_device ? transfer_device_memory(transfer, *file, location) : transfer_host_memory(transfer, *file);
    if (result > 0) {
        record_bytes(static_cast<std::uint64_t>(result));
        if (is_compat_stream_transfer && is_registered && location.is_device && transfer.concurrent_range) {
            mix_up_bytes(transfer, *file, location, static_cast<std::size_t>(result));
        }
    }
    return result;
}

ssize_t transfer_vectors(std::string_view symbol, bool is_write, FileHandle file, const IoVector* vectors,
                         std::size_t vector_count, off_t file_offset, unsigned flags) {
    return run_data_entry(symbol, [&]() -> ssize_t {
        if (config().cufile_version < first_version_with_vectors) {
            throw CufileError{platform_not_supported};
        }
        if (vectors == nullptr || vector_count == 0 || flags != 0) {
            throw CufileError{invalid_value};
        }
        const auto start_time = std::chrono::steady_clock::now();
        std::size_t total_bytes = 0;
        for (std::size_t index = 0; index < vector_count; ++index) {
            const Transfer transfer{CallType::vector,
                                    is_write,
                                    file,
                                    vectors[index].base,
                                    vectors[index].length_bytes,
                                    file_offset + static_cast<off_t>(total_bytes),
                                    0};
            const ssize_t bytes_or_error = run_transfer_without_throwing(transfer);
            if (bytes_or_error < 0 && total_bytes == 0) {
                return report_failed_transfer(static_cast<int>(-bytes_or_error));
            }
            total_bytes += static_cast<std::size_t>(std::max<ssize_t>(bytes_or_error, 0));
            if (bytes_or_error < 0 || static_cast<std::size_t>(bytes_or_error) < vectors[index].length_bytes) {
                break;
            }
        }
        TransferRecord record;
        record.call_type = CallType::vector;
        record.is_write = is_write;
        record.result = static_cast<ssize_t>(total_bytes);
        record.duration =
            std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start_time);
        count_vectored_call(record);
        return record.result;
    });
}

} // namespace

ssize_t run_transfer(const Transfer& transfer) {
    const OperationInProgress operation_in_progress;
    const auto start_time = std::chrono::steady_clock::now();
    TransferRecord record;
    record.call_type = transfer.call_type;
    record.is_write = transfer.is_write;
    try {
        record.result = transfer_bytes(transfer, &record);
    } catch (const CufileError& error) {
        record.result = -error.status;
        count_transfer(record);
        throw;
    }
    const int saved_errno = errno;
    record.duration =
        std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start_time);
    count_transfer(record);
    if ((transfer.call_type == CallType::batch || transfer.call_type == CallType::vector) && record.result >= 0) {
        count_batch_submission(record.route);
    }
    errno = saved_errno;
    return record.result;
}

ssize_t run_transfer_without_throwing(const Transfer& transfer) {
    try {
        const ssize_t transfer_result = run_transfer(transfer);
        return transfer_result == -1 ? -errno : transfer_result;
    } catch (const CufileError& error) {
        return -error.status;
    } catch (const std::bad_alloc&) {
        return -no_memory;
    }
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileRead(FileHandle file, void* buffer, std::size_t length_bytes, off_t file_offset,
                                       off_t buffer_offset) {
    return run_data_entry("cuFileRead", [&] {
        return run_transfer({CallType::single, false, file, buffer, length_bytes, file_offset, buffer_offset});
    });
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileWrite(FileHandle file, const void* buffer, std::size_t length_bytes,
                                        off_t file_offset, off_t buffer_offset) {
    return run_data_entry("cuFileWrite", [&] {
        return run_transfer(
            {CallType::single, true, file, const_cast<void*>(buffer), length_bytes, file_offset, buffer_offset});
    });
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileReadv(FileHandle file, const IoVector* vectors, std::size_t count, off_t file_offset,
                                        unsigned flags) {
    return transfer_vectors("cuFileReadv", false, file, vectors, count, file_offset, flags);
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileWritev(FileHandle file, const IoVector* vectors, std::size_t count, off_t file_offset,
                                         unsigned flags) {
    return transfer_vectors("cuFileWritev", true, file, vectors, count, file_offset, flags);
}

} // namespace gdrkit::twin::cufile
