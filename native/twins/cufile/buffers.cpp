// Implements cuFileBufRegister and cuFileBufDeregister, and the table of registered buffers.

#include "cufile/buffers.hpp"

#include <map>
#include <mutex>

#include "cufile/driver.hpp"
#include "cufile/entry.hpp"
#include "cufile/statistics.hpp"
#include "model/ledger.hpp"

namespace gdrkit::twin::cufile {
namespace {

// Type of registered buffers in the ledger of live handles (model/ledger.hpp).
constexpr std::string_view buffer_ledger_kind = "cufile_buffer";
constexpr int valid_flags = 3; // CU_FILE_RDMA_REGISTER (1) and CU_FILE_RDMA_RELAXED_ORDERING (2)

struct Buffer {
    std::size_t length_bytes = 0;
    MemoryLocation location;
};

struct Buffers {
    std::mutex mutex;
    std::map<std::uint64_t, Buffer> buffer_by_base;
};

Buffers& buffers() {
    static auto* const instance = new Buffers;
    return *instance;
}

void add_registration(std::uint64_t base, std::size_t length_bytes, const MemoryLocation& location) {
    Buffers& buffer_table = buffers();
    std::lock_guard lock(buffer_table.mutex);
    if (buffer_table.buffer_by_base.contains(base)) {
        throw CufileError{memory_already_registered};
    }
    record_open_handle(buffer_ledger_kind, base);
    buffer_table.buffer_by_base.emplace(base, Buffer{length_bytes, location});
}

Buffer remove_registration(std::uint64_t base) {
    Buffers& buffer_table = buffers();
    std::lock_guard lock(buffer_table.mutex);
    if (const auto entry = buffer_table.buffer_by_base.find(base); entry != buffer_table.buffer_by_base.end()) {
        // Without a current context the real library returns success and leaves the memory pinned (observed with 1.15
        // and 1.20). The twin fails instead, so that tests notice this leak.
        require_current_context(entry->second.location);
    }
    if (!record_closed_handle(buffer_ledger_kind, base)) {
        throw CufileError{memory_not_registered};
    }
    return buffer_table.buffer_by_base.extract(base).mapped();
}

} // namespace

bool check_registered(std::uint64_t base, std::uint64_t offset_bytes, std::size_t length_bytes,
                      const MemoryLocation& location) {
    Buffers& buffer_table = buffers();
    std::lock_guard lock(buffer_table.mutex);
    const auto entry = buffer_table.buffer_by_base.find(base);
    if (entry == buffer_table.buffer_by_base.end()) {
        return false;
    }
    if (entry->second.location.buffer_id != location.buffer_id) {
        throw CufileError{cuda_pointer_invalid};
    }
    if (offset_bytes > entry->second.length_bytes || length_bytes > entry->second.length_bytes - offset_bytes) {
        throw CufileError{invalid_mapping_range};
    }
    return true;
}

void drop_buffers() {
    Buffers& buffer_table = buffers();
    std::lock_guard lock(buffer_table.mutex);
    for (const auto& [base, buffer] : buffer_table.buffer_by_base) {
        static_cast<void>(record_closed_handle(buffer_ledger_kind, base));
    }
    buffer_table.buffer_by_base.clear();
}

GDRKIT_CUFILE_ENTRY Error cuFileBufRegister(const void* address, std::size_t length_bytes, int flags) {
    const auto base = reinterpret_cast<std::uint64_t>(address);
    int device = -1; // ordinal of the GPU; -1: host memory, or an error before the memory was found
    const Error result = run_entry("cuFileBufRegister", [&] {
        if (base == 0 || length_bytes == 0 || (flags & ~valid_flags) != 0 || base + length_bytes < base) {
            throw CufileError{invalid_value};
        }
        ensure_open();
        const MemoryLocation location = find_location(base);
        device = location.device_ordinal;
        require_current_context(location);
        if (location.is_device) {
            check_allocated(base, length_bytes);
        }
        add_registration(base, length_bytes, location);
    });
    count_registration(device, length_bytes, /*is_registration=*/true, result.error == success);
    return result;
}

GDRKIT_CUFILE_ENTRY Error cuFileBufDeregister(const void* address) {
    Buffer buffer;
    const Error result = run_entry("cuFileBufDeregister", [&] {
        // While the driver is not open, the real library returns driver_closing.
        if (!is_open()) {
            throw CufileError{driver_closing};
        }
        buffer = remove_registration(reinterpret_cast<std::uint64_t>(address));
    });
    count_registration(buffer.location.device_ordinal, buffer.length_bytes, /*is_registration=*/false,
                       result.error == success);
    return result;
}

} // namespace gdrkit::twin::cufile
