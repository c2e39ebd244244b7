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

// What direct transfers need of offsets and sizes.
constexpr std::uint64_t aligned_bytes = 4096;
constexpr std::size_t piece_bytes = 1 << 20;

struct Chosen {
    Route route = Route::posix;
    bool unaligned = false;
};

// The plan says what the machine could do; what of that this transfer gets, depends on it and on the driver.
Chosen choose(const Transfer& transfer, const File& file, const Place& place) {
    const Route possible = static_cast<Route>(hit("cufile.route").value_or(static_cast<int>(Route::posix)));
    const Modes in_force = modes();
    const auto sum = static_cast<std::uint64_t>(transfer.file_offset) |
                     static_cast<std::uint64_t>(transfer.buffer_offset) | transfer.length_bytes;
    Chosen chosen;
    chosen.unaligned = sum % aligned_bytes != 0;
    if (place.device && file.direct && !chosen.unaligned && !in_force.force_compat) {
        chosen.route = possible;
    }
    if (chosen.route == Route::posix && place.device && !in_force.allow_compat) {
        throw Refused{io_not_supported};
    }
    return chosen;
}

void check(const Transfer& transfer) {
    if (transfer.buffer == nullptr || transfer.file_offset < 0 || transfer.buffer_offset < 0 ||
        transfer.length_bytes > SSIZE_MAX ||
        transfer.length_bytes > static_cast<std::size_t>(LONG_MAX - transfer.file_offset) ||
        transfer.length_bytes > static_cast<std::size_t>(LONG_MAX - transfer.buffer_offset)) {
        throw Refused{invalid_value};
    }
}

ssize_t at_once(const Transfer& transfer, int fd, void* where, std::size_t length_bytes, off_t offset) {
    ssize_t moved = 0;
    do {
        moved = transfer.writing ? pwrite(fd, where, length_bytes, offset) : pread(fd, where, length_bytes, offset);
    } while (moved < 0 && errno == EINTR);
    return moved;
}

// Piece by piece; what moved before an error counts, and the error then shows at the next call, as with pread.
template <typename Piece> ssize_t in_pieces(const Transfer& transfer, Piece&& piece) {
    std::size_t done = 0;
    while (done < transfer.length_bytes) {
        const std::size_t wanted = std::min(piece_bytes, transfer.length_bytes - done);
        const ssize_t moved = piece(done, wanted);
        if (moved < 0 && done == 0) {
            return -1;
        }
        if (moved <= 0) {
            break;
        }
        done += static_cast<std::size_t>(moved);
        if (static_cast<std::size_t>(moved) < wanted) {
            break;
        }
    }
    return static_cast<ssize_t>(done);
}

ssize_t with_device(const Transfer& transfer, const File& file, const Place& place) {
    const std::uint64_t base =
        reinterpret_cast<std::uint64_t>(transfer.buffer) + static_cast<std::uint64_t>(transfer.buffer_offset);
    const std::unique_ptr<char[]> staging(new char[std::min(piece_bytes, transfer.length_bytes)]);
    const Copier copier(place);
    return in_pieces(transfer, [&](std::size_t done, std::size_t wanted) {
        const off_t offset = transfer.file_offset + static_cast<off_t>(done);
        if (transfer.writing) {
            copier.from_device(staging.get(), base + done, wanted);
            return at_once(transfer, file.own.get(), staging.get(), wanted, offset);
        }
        const ssize_t moved = at_once(transfer, file.own.get(), staging.get(), wanted, offset);
        if (moved > 0) {
            copier.to_device(base + done, staging.get(), static_cast<std::size_t>(moved));
        }
        return moved;
    });
}

ssize_t with_host(const Transfer& transfer, const File& file) {
    char* const base = static_cast<char*>(transfer.buffer) + transfer.buffer_offset;
    return in_pieces(transfer, [&](std::size_t done, std::size_t wanted) {
        return at_once(transfer, file.own.get(), base + done, wanted, transfer.file_offset + static_cast<off_t>(done));
    });
}

ssize_t move(const Transfer& transfer, Done* done) {
    check(transfer);
    const FileRef file = find_file(transfer.file);
    if (!file) {
        errno = EBADF;
        return -1;
    }
    const auto base = reinterpret_cast<std::uint64_t>(transfer.buffer);
    const auto offset = static_cast<std::uint64_t>(transfer.buffer_offset);
    const Place place = place_of(base);
    done->device = place.ordinal;
    check_registered(base, offset, transfer.length_bytes, place);
    if (place.device) {
        check_allocated(base + offset, transfer.length_bytes);
    }
    const Chosen chosen = choose(transfer, *file, place);
    done->route = chosen.route;
    done->unaligned = chosen.unaligned;
    if (transfer.length_bytes == 0) {
        return 0;
    }
    return place.device ? with_device(transfer, *file, place) : with_host(transfer, *file);
}

ssize_t vectored(std::string_view symbol, bool writing, FileHandle file, const IoVector* vectors, std::size_t count,
                 off_t file_offset, unsigned flags) {
    return data_entry(symbol, [&]() -> ssize_t {
        if (vectors == nullptr || count == 0 || flags != 0) {
            throw Refused{invalid_value};
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
            const ssize_t moved = answer_of(transfer);
            if (moved < 0 && sum == 0) {
                return data_failure(static_cast<int>(-moved));
            }
            sum += static_cast<std::size_t>(std::max<ssize_t>(moved, 0));
            if (moved < 0 || static_cast<std::size_t>(moved) < vectors[index].length_bytes) {
                break;
            }
        }
        Done done;
        done.call = Call::vector;
        done.writing = writing;
        done.result = static_cast<ssize_t>(sum);
        done.took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
        count_vectors(done);
        return done.result;
    });
}

} // namespace

ssize_t carry_out(const Transfer& transfer) {
    const AtWork at_work;
    const auto begin = std::chrono::steady_clock::now();
    Done done;
    done.call = transfer.call;
    done.writing = transfer.writing;
    try {
        done.result = move(transfer, &done);
    } catch (const Refused& refused) {
        done.result = -refused.status;
        count(done);
        throw;
    }
    const int kept = errno;
    done.took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
    count(done);
    if ((transfer.call == Call::batch || transfer.call == Call::vector) && done.result >= 0) {
        count_submitted(done.route);
    }
    errno = kept;
    return done.result;
}

ssize_t answer_of(const Transfer& transfer) {
    try {
        const ssize_t moved = carry_out(transfer);
        return moved == -1 ? -errno : moved;
    } catch (const Refused& refused) {
        return -refused.status;
    } catch (const std::bad_alloc&) {
        return -no_memory;
    }
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileRead(FileHandle file, void* buffer, std::size_t length_bytes, off_t file_offset,
                                       off_t buffer_offset) {
    return data_entry("cuFileRead", [&] {
        return carry_out({Call::plain, false, file, buffer, length_bytes, file_offset, buffer_offset});
    });
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileWrite(FileHandle file, const void* buffer, std::size_t length_bytes,
                                        off_t file_offset, off_t buffer_offset) {
    return data_entry("cuFileWrite", [&] {
        return carry_out(
            {Call::plain, true, file, const_cast<void*>(buffer), length_bytes, file_offset, buffer_offset});
    });
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileReadv(FileHandle file, const IoVector* vectors, std::size_t count, off_t file_offset,
                                        unsigned flags) {
    return vectored("cuFileReadv", false, file, vectors, count, file_offset, flags);
}

GDRKIT_CUFILE_ENTRY ssize_t cuFileWritev(FileHandle file, const IoVector* vectors, std::size_t count, off_t file_offset,
                                         unsigned flags) {
    return vectored("cuFileWritev", true, file, vectors, count, file_offset, flags);
}

} // namespace gdrkit::twin::cufile
