// CUDA IPC of memory: handles of cuMemAlloc memory, and mappings of memory of another process.
#include <sys/stat.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/ipc_handle.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "cuda/visible_devices.hpp"
#include "model/dmabuf.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin::cuda {
namespace {

// To open an IPC handle, a process sends the buffer id to the control service of the process that owns the memory. The
// owner replies with this message and a descriptor of the memory.
struct ReplyMessage {
    std::uint64_t length_bytes;
    std::uint64_t memory_offset;  // offset of the allocation in the memory file, in bytes
    std::uint64_t memory_bytes;   // size of the memory file
    std::int32_t physical_number; // number of the device (visible_devices.hpp)
    std::uint32_t is_found;       // 0: the allocation does not exist or was freed, and the other fields are 0
};
static_assert(sizeof(ReplyMessage) == 32);

struct ImportedMapping {
    RangeRef range;
    std::uint64_t open_count = 0; // number of cuIpcOpenMemHandle calls minus cuIpcCloseMemHandle calls
};

struct Ipc {
    std::mutex mutex;
    std::map<std::uint64_t, std::weak_ptr<Range>> exported_ranges; // key: buffer id
    std::map<std::pair<std::uint64_t, std::uint64_t>, ImportedMapping>
        imported_mappings;              // key: HandleMessage::owner_service_id, buffer id
    bool is_handler_registered = false; // the control service calls serve_memory()
};

Ipc& ipc() {
    static auto* const instance = new Ipc;
    return *instance;
}

// Return the exported allocation with this id; null if it does not exist or was freed.
RangeRef find_exported(std::uint64_t buffer_id) {
    RangeRef range;
    {
        Ipc& ipc_table = ipc();
        std::lock_guard lock(ipc_table.mutex);
        const auto entry = ipc_table.exported_ranges.find(buffer_id);
        range = entry == ipc_table.exported_ranges.end() ? nullptr : entry->second.lock();
    }
    // Queued work of a stream may keep a freed range alive, so check that the range is still in the address space.
    return range && find_range_by_base(range->base) == range ? range : nullptr;
}

// Handle the request of a process that opens an IPC handle: reply with the allocation and a descriptor of its memory.
void serve_memory(std::span<const std::byte> request, std::vector<std::byte>* reply, std::vector<Fd>* fds) {
    std::uint64_t buffer_id = 0;
    if (request.size() != sizeof buffer_id) {
        return;
    }
    std::memcpy(&buffer_id, request.data(), sizeof buffer_id);
    ReplyMessage message{};
    if (const RangeRef range = find_exported(buffer_id)) {
        if (Fd fd = reopen(range->memory->fd())) {
            message = {range->length_bytes, range->memory_offset, range->memory->length_bytes(),
                       get_physical_number(range->device), 1};
            fds->push_back(std::move(fd));
        }
    }
    reply->resize(sizeof message);
    std::memcpy(reply->data(), &message, sizeof message);
}

// Request the memory of an IPC handle from the owning process, check the reply, and map the memory in this process.
Result request_memory(const HandleMessage& message, MemoryRef* memory, Device* device, ReplyMessage* reply_message) {
    std::vector<std::byte> request(sizeof message.object_id), reply;
    std::memcpy(request.data(), &message.object_id, sizeof message.object_id);
    std::vector<Fd> fds;
    // An H200 distinguishes two errors: the owner is gone (invalid_handle), or the memory was freed (invalid_value).
    if (!send_control_request(message.owner_service_id, cuda_ipc_request, request, &reply, &fds)) {
        return invalid_handle;
    }
    if (reply.size() != sizeof *reply_message) {
        return invalid_value;
    }
    std::memcpy(reply_message, reply.data(), sizeof *reply_message);
    if (reply_message->is_found == 0 || fds.size() != 1) {
        return invalid_value;
    }
    struct stat memory_status {};
    const bool is_valid = is_device_memory(fds[0].get()) && fstat(fds[0].get(), &memory_status) == 0 &&
                          reply_message->length_bytes == message.length_bytes &&
                          static_cast<std::uint64_t>(memory_status.st_size) == reply_message->memory_bytes &&
                          reply_message->memory_offset < page_bytes &&
                          reply_message->memory_bytes > reply_message->memory_offset &&
                          reply_message->length_bytes <= reply_message->memory_bytes - reply_message->memory_offset;
    if (!is_valid || reply_message->physical_number != message.physical_number) {
        return invalid_value;
    }
    const auto ordinal = find_ordinal(reply_message->physical_number);
    if (!ordinal) {
        return invalid_device;
    }
    *device = *ordinal;
    return Memory::adopt(std::move(fds[0]), reply_message->memory_bytes, *device, memory);
}

Result open_handle(const ContextRef& context, DevicePointer* pointer, const IpcHandle& handle, unsigned flags) {
    HandleMessage message{};
    if (pointer == nullptr || flags != ipc_lazy_enable_peer_access || !read_handle(memory_magic, handle, &message) ||
        message.length_bytes == 0) {
        return invalid_value;
    }
    if (message.owner_service_id == read_control_service_id()) {
        return invalid_context;
    }
    Ipc& ipc_table = ipc();
    // This thread holds open_mutex while it queries the owner, so that two threads that open the same handle share one
    // mapping. No deadlock is possible: the owner is another process, and the control service of this process takes
    // only the lock of ipc().
    static auto* const open_mutex = new std::mutex;
    std::lock_guard open_lock(*open_mutex);
    const std::pair mapping_key{message.owner_service_id, message.object_id};
    {
        std::lock_guard lock(ipc_table.mutex);
        // Drop mappings that were destroyed with their context.
        std::erase_if(ipc_table.imported_mappings, [](const auto& entry) {
            return find_range_by_base(entry.second.range->base) != entry.second.range;
        });
        if (const auto found_entry = ipc_table.imported_mappings.find(mapping_key);
            found_entry != ipc_table.imported_mappings.end()) {
            ++found_entry->second.open_count;
            *pointer = found_entry->second.range->base;
            return success;
        }
    }
    RangeRef range;
    if (const Result result = map_imported_memory(message, MemoryKind::ipc, &range); result != success) {
        return result;
    }
    range->context = context->owning_context_handle;
    add_range(range);
    std::lock_guard lock(ipc_table.mutex);
    ipc_table.imported_mappings[mapping_key] = {range, 1};
    *pointer = range->base;
    return success;
}

// Drop one reference to the mapping. Return true if it was the last reference, or if the mapping is not in the table.
bool drop_reference(const RangeRef& range) {
    Ipc& ipc_table = ipc();
    std::lock_guard lock(ipc_table.mutex);
    for (auto entry = ipc_table.imported_mappings.begin(); entry != ipc_table.imported_mappings.end(); ++entry) {
        if (entry->second.range == range) {
            if (--entry->second.open_count > 0) {
                return false;
            }
            ipc_table.imported_mappings.erase(entry);
            return true;
        }
    }
    return true;
}

} // namespace

Result map_imported_memory(const HandleMessage& message, MemoryKind kind, RangeRef* new_range, bool is_host) {
    MemoryRef memory;
    Device device = 0;
    ReplyMessage reply_message{};
    if (const Result result = request_memory(message, &memory, &device, &reply_message); result != success) {
        return result;
    }
    if (is_host) {
        *new_range = map_shared_host_memory(std::move(memory), reply_message.length_bytes);
        return success;
    }
    // The slot begins at a page, so that the allocation has the same page offset as in the owning process.
    const AddressSlot slot = allocate_address_slot(round_up(reply_message.memory_bytes, min_aligned_bytes));
    if (slot.base == 0) {
        return out_of_memory;
    }
    auto range = std::make_shared<Range>();
    range->kind = kind;
    range->base = slot.base + reply_message.memory_offset;
    range->slot = slot;
    range->memory = std::move(memory);
    range->memory_offset = reply_message.memory_offset;
    range->length_bytes = reply_message.length_bytes;
    range->buffer_id = make_buffer_id();
    range->device = device;
    *new_range = std::move(range);
    return success;
}

HandleMessage export_memory(const RangeRef& range) {
    HandleMessage message{};
    message.object_id = range->buffer_id;
    message.length_bytes = range->length_bytes;
    message.physical_number = get_physical_number(range->device);
    message.pool = range->pool;
    Ipc& ipc_table = ipc();
    std::lock_guard lock(ipc_table.mutex);
    if (!ipc_table.is_handler_registered) {
        register_handler(cuda_ipc_request, serve_memory);
        ipc_table.is_handler_registered = true;
    }
    std::erase_if(ipc_table.exported_ranges, [](const auto& entry) { return entry.second.expired(); });
    ipc_table.exported_ranges[range->buffer_id] = range;
    return message;
}

GDRKIT_CUDA_ENTRY Result cuIpcGetMemHandle(IpcHandle* handle, DevicePointer pointer) {
    return run_entry_in_context("cuIpcGetMemHandle", [&](const ContextRef&) {
        const RangeRef range = find_range(pointer);
        if (handle == nullptr || !range || range->kind != MemoryKind::device) {
            return invalid_value;
        }
        write_handle(memory_magic, export_memory(range), handle);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuIpcOpenMemHandle(DevicePointer* pointer, IpcHandle handle, unsigned flags) {
    return run_entry_in_context(
        "cuIpcOpenMemHandle", [&](const ContextRef& context) { return open_handle(context, pointer, handle, flags); });
}

GDRKIT_CUDA_ENTRY Result cuIpcOpenMemHandle_v2(DevicePointer* pointer, IpcHandle handle, unsigned flags) {
    return run_entry_in_context("cuIpcOpenMemHandle_v2", [&](const ContextRef& context) {
        return open_handle(context, pointer, handle, flags);
    });
}

GDRKIT_CUDA_ENTRY Result cuIpcCloseMemHandle(DevicePointer pointer) {
    return run_entry_in_context("cuIpcCloseMemHandle", [&](const ContextRef& context) {
        RangeRef range = find_range_by_base(pointer);
        if (range && range->kind != MemoryKind::ipc) {
            return invalid_value;
        }
        if (range && !drop_reference(range)) {
            return success;
        }
        synchronise(context);
        const Result result = remove_range(pointer, {MemoryKind::ipc}, &range);
        if (result == success) {
            free_address_slot(range->slot);
        }
        return result;
    });
}

} // namespace gdrkit::twin::cuda
