// Host memory that the device can access: pinned, registered and managed memory. The device address of this memory
// equals its host address.
#include <sys/mman.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "model/dmabuf.hpp"
#include "model/ledger.hpp"

namespace gdrkit::twin::cuda {
namespace {

Result allocate_host(const ContextRef& context, void** pointer, std::size_t length_bytes, unsigned flags) {
    constexpr unsigned known_flags = host_alloc_portable | host_alloc_devicemap | host_alloc_write_combined;
    if (pointer == nullptr || (flags & ~known_flags) != 0) {
        return invalid_value;
    }
    *pointer = nullptr;
    if (length_bytes == 0) {
        return success;
    }
    const RangeRef range = make_host_range(MemoryKind::host_alloc, length_bytes);
    if (!range) {
        return out_of_memory;
    }
    range->context = context->owning_context_handle;
    range->device = context->device;
    // With unified addressing, every allocation is mapped for the device, so the real driver always reports this flag.
    range->host_flags = flags | host_alloc_devicemap;
    add_range(range);
    *pointer = range->host;
    return success;
}

// Return whether every page of the range is mapped in this process.
bool is_mapped(std::uint64_t base, std::uint64_t length_bytes) {
    const std::uint64_t first_page_base = base / page_bytes * page_bytes;
    const std::uint64_t page_count = (round_up(base + length_bytes, page_bytes) - first_page_base) / page_bytes;
    std::vector<unsigned char> residency(page_count);
    // mincore fails with ENOMEM for pages that are not mapped.
    return mincore(reinterpret_cast<void*>(first_page_base), page_count * page_bytes, residency.data()) == 0;
}

Result register_host(const ContextRef& context, void* pointer, std::size_t length_bytes, unsigned flags) {
    constexpr unsigned known_flags =
        host_register_portable | host_register_devicemap | host_register_iomemory | host_register_read_only;
    const auto base = reinterpret_cast<std::uint64_t>(pointer);
    if (pointer == nullptr || length_bytes == 0 || base + length_bytes < base || (flags & ~known_flags) != 0) {
        return invalid_value;
    }
    if ((flags & host_register_iomemory) != 0) {
        return not_supported;
    }
    if (is_device_address(base) || !is_mapped(base, length_bytes)) {
        return invalid_value;
    }
    auto range = std::make_shared<Range>();
    range->kind = MemoryKind::host_registered;
    range->base = base;
    range->length_bytes = length_bytes;
    range->host = static_cast<std::byte*>(pointer);
    range->host_flags = flags;
    range->buffer_id = make_buffer_id();
    range->context = context->owning_context_handle;
    range->device = context->device;
    return add_range_unless_overlapping(range) ? success : host_memory_already_registered;
}

} // namespace

RangeRef make_host_range(MemoryKind kind, std::uint64_t length_bytes) {
    if (length_bytes > UINT64_MAX - page_bytes) {
        return nullptr;
    }
    const std::uint64_t mapping_bytes = round_up(length_bytes, page_bytes);
    void* const pages = mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        return nullptr;
    }
    auto range = std::make_shared<Range>();
    range->kind = kind;
    range->base = reinterpret_cast<std::uint64_t>(pages);
    range->length_bytes = length_bytes;
    range->buffer_id = make_buffer_id();
    range->host = static_cast<std::byte*>(pages);
    range->owning_object =
        std::shared_ptr<void>(pages, [mapping_bytes](void* mapping) { munmap(mapping, mapping_bytes); });
    return range;
}

RangeRef map_shared_host_memory(MemoryRef memory, std::uint64_t length_bytes) {
    auto range = std::make_shared<Range>();
    range->kind = MemoryKind::pool;
    range->base = reinterpret_cast<std::uint64_t>(memory->data());
    range->length_bytes = length_bytes;
    range->buffer_id = make_buffer_id();
    range->device = memory->device();
    range->host = memory->data();
    range->memory = std::move(memory);
    return range;
}

Result make_shared_host_range(Device device, std::uint64_t length_bytes, RangeRef* range) {
    if (length_bytes > UINT64_MAX - page_bytes) {
        return out_of_memory;
    }
    const std::uint64_t memory_bytes = round_up(length_bytes, page_bytes);
    // make_device_memory sets the seals that a process checks before it maps memory of another process.
    Fd fd(make_device_memory(memory_bytes));
    MemoryRef memory;
    const Result result = fd ? Memory::adopt(std::move(fd), memory_bytes, device, &memory) : out_of_memory;
    if (result == success) {
        *range = map_shared_host_memory(std::move(memory), length_bytes);
    }
    return result;
}

GDRKIT_CUDA_ENTRY Result cuMemHostAlloc(void** pointer, std::size_t length_bytes, unsigned flags) {
    return run_entry_in_context("cuMemHostAlloc", [&](const ContextRef& context) {
        return allocate_host(context, pointer, length_bytes, flags);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAllocHost_v2(void** pointer, std::size_t length_bytes) {
    return run_entry_in_context("cuMemAllocHost_v2", [&](const ContextRef& context) {
        return allocate_host(context, pointer, length_bytes, 0);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemFreeHost(void* pointer) {
    return run_entry_in_context("cuMemFreeHost", [&](const ContextRef& context) {
        if (pointer == nullptr) {
            return success;
        }
        synchronise(context);
        RangeRef range;
        return remove_range(reinterpret_cast<std::uint64_t>(pointer), {MemoryKind::host_alloc}, &range);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemHostRegister(void* pointer, std::size_t length_bytes, unsigned flags) {
    return run_entry_in_context("cuMemHostRegister", [&](const ContextRef& context) {
        return register_host(context, pointer, length_bytes, flags);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemHostRegister_v2(void* pointer, std::size_t length_bytes, unsigned flags) {
    return run_entry_in_context("cuMemHostRegister_v2", [&](const ContextRef& context) {
        return register_host(context, pointer, length_bytes, flags);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemHostUnregister(void* pointer) {
    return run_entry_in_context("cuMemHostUnregister", [&](const ContextRef& context) {
        const auto address = reinterpret_cast<std::uint64_t>(pointer);
        const RangeRef range = find_range(address);
        if (!range || range->kind != MemoryKind::host_registered) {
            // Do not call remove_range(), which ends the process at a double free. A second unregister is only an
            // error, because the memory belongs to the program.
            return host_memory_not_registered;
        }
        if (range->base != address) {
            return invalid_value;
        }
        synchronise(context);
        RangeRef removed_range;
        return remove_range(address, {MemoryKind::host_registered}, &removed_range);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemHostGetDevicePointer_v2(DevicePointer* pointer, void* host, unsigned flags) {
    return run_entry_in_context("cuMemHostGetDevicePointer_v2", [&](const ContextRef&) {
        const auto address = reinterpret_cast<std::uint64_t>(host);
        const RangeRef range = find_range(address);
        if (pointer == nullptr || flags != 0 || !range || !range->is_host()) {
            return invalid_value;
        }
        *pointer = address;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemHostGetFlags(unsigned* flags, void* host) {
    return run_entry_in_context("cuMemHostGetFlags", [&](const ContextRef&) {
        const RangeRef range = find_range(reinterpret_cast<std::uint64_t>(host));
        if (flags == nullptr || !range || range->kind != MemoryKind::host_alloc) {
            return invalid_value;
        }
        *flags = range->host_flags;
        return success;
    });
}

} // namespace gdrkit::twin::cuda
