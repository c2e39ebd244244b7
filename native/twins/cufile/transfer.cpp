// Transfers between files and memory: cuFileRead, cuFileWrite, cuFileReadv and cuFileWritev.

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

namespace gdrkit::twin::cufile {
namespace {

// Alignment that direct transfers require of offsets and sizes.
constexpr std::uint64_t direct_alignment_bytes = 4096;
constexpr std::size_t chunk_bytes = 1 << 20;

struct RouteChoice {
    Route route = Route::posix;
    bool unaligned = false;
};

// Choose the path of a transfer. The fault plan says which path the machine supports; the transfer takes it only if
// its alignment, file and the driver's settings allow.
RouteChoice choose_route(const Transfer& transfer, const File& file, const MemoryLocation& location) {
    const Route possible = static_cast<Route>(injected_fault("cufile.route").value_or(static_cast<int>(Route::posix)));
    const Modes current_modes = modes();
    const auto sum = static_cast<std::uint64_t>(transfer.file_offset) |
                     static_cast<std::uint64_t>(transfer.buffer_offset) | transfer.length_bytes;
    RouteChoice choice;
    choice.unaligned = sum % direct_alignment_bytes != 0;
    if (location.device && file.direct && !choice.unaligned && !current_modes.force_compat) {
        choice.route = possible;
    }
    if (choice.route == Route::posix && location.device && !current_modes.allow_compat) {
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

ssize_t pread_or_pwrite(const Transfer& transfer, int fd, void* where, std::size_t length_bytes, off_t offset) {
    ssize_t moved = 0;
    do {
        moved = transfer.writing ? pwrite(fd, where, length_bytes, offset) : pread(fd, where, length_bytes, offset);
    } while (moved < 0 && errno == EINTR);
    return moved;
}

// Transfer in chunks. Bytes moved before an error count; the error is then reported by the next call, as with pread.
template <typename CopyChunk> ssize_t for_each_chunk(const Transfer& transfer, CopyChunk&& copy_chunk) {
    std::size_t transferred = 0;
    while (transferred < transfer.length_bytes) {
        const std::size_t chunk_size = std::min(chunk_bytes, transfer.length_bytes - transferred);
        const ssize_t moved = copy_chunk(transferred, chunk_size);
        if (moved < 0 && transferred == 0) {
            return -1;
        }
        if (moved <= 0) {
            break;
        }
        transferred += static_cast<std::size_t>(moved);
        if (static_cast<std::size_t>(moved) < chunk_size) {
            break;
        }
    }
    return static_cast<ssize_t>(transferred);
}

ssize_t transfer_device_memory(const Transfer& transfer, const File& file, const MemoryLocation& location) {
    const std::uint64_t base =
        reinterpret_cast<std::uint64_t>(transfer.buffer) + static_cast<std::uint64_t>(transfer.buffer_offset);
    const std::unique_ptr<char[]> staging(new char[std::min(chunk_bytes, transfer.length_bytes)]);
    const DeviceCopier copier(location);
    return for_each_chunk(transfer, [&](std::size_t transferred, std::size_t chunk_size) {
        const off_t offset = transfer.file_offset + static_cast<off_t>(transferred);
        if (transfer.writing) {
            copier.from_device(staging.get(), base + transferred, chunk_size);
            return pread_or_pwrite(transfer, file.reopened.get(), staging.get(), chunk_size, offset);
        }
        const ssize_t moved = pread_or_pwrite(transfer, file.reopened.get(), staging.get(), chunk_size, offset);
        if (moved > 0) {
            copier.to_device(base + transferred, staging.get(), static_cast<std::size_t>(moved));
        }
        return moved;
    });
}

ssize_t transfer_host_memory(const Transfer& transfer, const File& file) {
    char* const base = static_cast<char*>(transfer.buffer) + transfer.buffer_offset;
    return for_each_chunk(transfer, [&](std::size_t transferred, std::size_t chunk_size) {
        return pread_or_pwrite(transfer, file.reopened.get(), base + transferred, chunk_size,
                               transfer.file_offset + static_cast<off_t>(transferred));
    });
}

ssize_t transfer_bytes(const Transfer& transfer, TransferRecord* record) {
    check_arguments(transfer);
    const FileRef file = find_file(transfer.file);
    if (!file) {
        errno = EBADF;
        return -1;
    }
    const auto base = reinterpret_cast<std::uint64_t>(transfer.buffer);
    const auto offset = static_cast<std::uint64_t>(transfer.buffer_offset);
    const MemoryLocation location = location_of(base);
    record->device = location.ordinal;
    check_registered(base, offset, transfer.length_bytes, location);
    if (location.device) {
        check_allocated(base + offset, transfer.length_bytes);
    }
    const RouteChoice choice = choose_route(transfer, *file, location);
    record->route = choice.route;
    record->unaligned = choice.unaligned;
    if (transfer.length_bytes == 0) {
        return 0;
    }
    return location.device ? transfer_device_memory(transfer, *file, location) : transfer_host_memory(transfer, *file);
}

ssize_t transfer_vectors(std::string_view symbol, bool writing, FileHandle file, const IoVector* vectors,
                         std::size_t count, off_t file_offset, unsigned flags) {
    return data_entry(symbol, [&]() -> ssize_t {
        if (vectors == nullptr || count == 0 || flags != 0) {
            throw CufileError{invalid_value};
        }
        const auto begin = std::chrono::steady_clock::now();
        std::size_t sum = 0;
        for (std::size_t index = 0; index < count; ++index) {
            const Transfer transfer{Call::vector,
                                    writing,
                                    file,
                                    vectors[index].base,
                                    vectors[index].length_bytes,
                                    file_offset + static_cast<off_t>(sum),
                                    0};
            const ssize_t moved = transfer_result(transfer);
            if (moved < 0 && sum == 0) {
                return data_failure(static_cast<int>(-moved));
            }
            sum += static_cast<std::size_t>(std::max<ssize_t>(moved, 0));
            if (moved < 0 || static_cast<std::size_t>(moved) < vectors[index].length_bytes) {
                break;
            }
        }
        TransferRecord record;
        record.call = Call::vector;
        record.writing = writing;
        record.result = static_cast<ssize_t>(sum);
        record.duration =
            std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
        count_vectored_call(record);
        return record.result;
    });
}

} // namespace

ssize_t run_transfer(const Transfer& transfer) {
    const OperationInProgress operations_in_progress;
    const auto begin = std::chrono::steady_clock::now();
    TransferRecord record;
    record.call = transfer.call;
    record.writing = transfer.writing;
    try {
        record.result = transfer_bytes(transfer, &record);
    } catch (const CufileError& error) {
        record.result = -error.status;
        count(record);
        throw;
    }
    const int saved_errno = errno;
    record.duration = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
    count(record);
    if ((transfer.call == Call::batch || transfer.call == Call::vector) && record.result >= 0) {
        count_submitted(record.route);
    }
    errno = saved_errno;
    return record.result;
}

ssize_t transfer_result(const Transfer& transfer) {
    try {
        const ssize_t moved = run_transfer(transfer);
        return moved == -1 ? -errno : moved;
    } catch (const CufileError& error) {
        return -error.status;
    } catch (const std::bad_alloc&) {
        return -no_memory;
    }
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileRead(FileHandle file, void* buffer, std::size_t length_bytes, off_t file_offset,
                                       off_t buffer_offset) {
    return data_entry("cuFileRead", [&] {
        return run_transfer({Call::plain, false, file, buffer, length_bytes, file_offset, buffer_offset});
    });
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileWrite(FileHandle file, const void* buffer, std::size_t length_bytes,
                                        off_t file_offset, off_t buffer_offset) {
    return data_entry("cuFileWrite", [&] {
        return run_transfer(
            {Call::plain, true, file, const_cast<void*>(buffer), length_bytes, file_offset, buffer_offset});
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
