// CUDA IPC: memory of cuMemAlloc in another process of the machine.
#include <fcntl.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "model/dmabuf.hpp"
#include "model/rendezvous.hpp"

namespace gdrkit::twin::cuda {
namespace {

// What is in the 64 bytes of a handle. They may come from anywhere, so every field is checked.
struct WireHandle {
    char magic[8];
    std::uint64_t owner;     // name of the control service of the owner
    std::uint64_t buffer_id; // of the allocation, in its process
    std::uint64_t length_bytes;
    std::int32_t device;
    std::uint32_t zero[5];
    std::uint64_t checksum; // of all before it
};
static_assert(sizeof(WireHandle) == sizeof(IpcMemHandle) && offsetof(WireHandle, checksum) == 56);

constexpr char magic[8] = {'g', 'd', 'r', 'k', 'i', 't', 'I', 'P'};

struct WireReply {
    std::uint64_t length_bytes;
    std::uint64_t memory_offset;
    std::uint64_t memory_bytes;
    std::int32_t device;
    std::uint32_t found; // 0: there is no such allocation, or no longer; nothing else is said then
};
static_assert(sizeof(WireReply) == 32);

struct Mapping {
    RangeRef range;
    std::uint64_t opened = 0;
};

struct Ipc {
    std::mutex mutex;
    std::map<std::uint64_t, std::weak_ptr<Range>> exported;              // by buffer id
    std::map<std::pair<std::uint64_t, std::uint64_t>, Mapping> imported; // by owner and buffer id
    bool serving = false;
};

Ipc& ipc() {
    static auto* const all = new Ipc;
    return *all;
}

std::uint64_t checksum_of(const WireHandle& wire) {
    std::uint64_t hash = 0xcbf29ce484222325; // FNV-1a
    const auto* bytes = reinterpret_cast<const unsigned char*>(&wire);
    for (std::size_t index = 0; index < offsetof(WireHandle, checksum); ++index) {
        hash = (hash ^ bytes[index]) * 0x100000001b3;
    }
    return hash;
}

// A descriptor of its own for the other process, so that the memory counts as held by it.
Fd reopen(int fd) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return Fd(open(path, O_RDWR | O_CLOEXEC));
}

// The exported allocation of this id; null when there is none, or when it was freed.
RangeRef find_exported(std::uint64_t buffer_id) {
    RangeRef range;
    {
        Ipc& all = ipc();
        std::lock_guard lock(all.mutex);
        const auto found = all.exported.find(buffer_id);
        range = found == all.exported.end() ? nullptr : found->second.lock();
    }
    // A freed range may live on in the queue of a stream; only one that is still found by its address counts.
    return range && range_at(range->base) == range ? range : nullptr;
}

// Answers another process.
void serve_memory(std::span<const std::byte> request, std::vector<std::byte>* reply, std::vector<Fd>* fds) {
    std::uint64_t buffer_id = 0;
    if (request.size() != sizeof buffer_id) {
        return;
    }
    std::memcpy(&buffer_id, request.data(), sizeof buffer_id);
    WireReply wire{};
    if (const RangeRef range = find_exported(buffer_id)) {
        if (Fd fd = reopen(range->memory->fd())) {
            wire = {range->length_bytes, range->memory_offset, range->memory->length_bytes(), range->device, 1};
            fds->push_back(std::move(fd));
        }
    }
    reply->resize(sizeof wire);
    std::memcpy(reply->data(), &wire, sizeof wire);
}

bool parse(const IpcMemHandle& handle, WireHandle* wire) {
    std::memcpy(wire, &handle, sizeof *wire);
    constexpr std::uint32_t zero[5] = {};
    return std::memcmp(wire->magic, magic, sizeof magic) == 0 && wire->checksum == checksum_of(*wire) &&
           std::memcmp(wire->zero, zero, sizeof zero) == 0 && wire->length_bytes != 0;
}

Result fetch(const WireHandle& wire, MemoryRef* memory, WireReply* answer) {
    std::vector<std::byte> request(sizeof wire.buffer_id), reply;
    std::memcpy(request.data(), &wire.buffer_id, sizeof wire.buffer_id);
    std::vector<Fd> fds;
    // The two answers that an H200 gives: its owner is gone, and it was freed.
    if (!ask(wire.owner, ask_cuda_ipc, request, &reply, &fds)) {
        return invalid_handle;
    }
    if (reply.size() != sizeof *answer) {
        return invalid_value;
    }
    std::memcpy(answer, reply.data(), sizeof *answer);
    if (answer->found == 0 || fds.size() != 1) {
        return invalid_value;
    }
    struct stat status {};
    const bool sound = is_device_memory(fds[0].get()) && fstat(fds[0].get(), &status) == 0 &&
                       answer->length_bytes == wire.length_bytes &&
                       static_cast<std::uint64_t>(status.st_size) == answer->memory_bytes &&
                       answer->memory_offset < page_bytes && answer->memory_bytes > answer->memory_offset &&
                       answer->length_bytes <= answer->memory_bytes - answer->memory_offset;
    if (!sound || answer->device != wire.device) {
        return invalid_value;
    }
    if (!device_exists(answer->device)) {
        return invalid_device;
    }
    return Memory::adopt(std::move(fds[0]), answer->memory_bytes, answer->device, memory);
}

Result map_in(const ContextRef& context, const WireHandle& wire, RangeRef* mapped) {
    MemoryRef memory;
    WireReply answer{};
    if (const Result result = fetch(wire, &memory, &answer); result != success) {
        return result;
    }
    // Whole pages, so that the range begins where it begins in the owner's page.
    const Slot slot = take_slot(round_up(answer.memory_bytes, std::uint64_t{1} << 20));
    if (slot.base == 0) {
        return out_of_memory;
    }
    auto range = std::make_shared<Range>();
    range->kind = Kind::ipc;
    range->base = slot.base + answer.memory_offset;
    range->slot = slot;
    range->memory = std::move(memory);
    range->memory_offset = answer.memory_offset;
    range->length_bytes = answer.length_bytes;
    range->buffer_id = new_buffer_id();
    range->device = answer.device;
    range->context = context->handle;
    add_range(range);
    *mapped = std::move(range);
    return success;
}

Result open_handle(const ContextRef& context, DevicePointer* pointer, const IpcMemHandle& handle, unsigned flags) {
    WireHandle wire{};
    if (pointer == nullptr || flags != ipc_lazy_enable_peer_access || !parse(handle, &wire)) {
        return invalid_value;
    }
    if (wire.owner == control_name()) {
        return invalid_context;
    }
    Ipc& all = ipc();
    // Held while the owner is asked, so that two threads that open one handle get one mapping. The service of this
    // process needs the lock only to look up what was exported, and the owner is another process.
    static auto* const opening = new std::mutex;
    std::lock_guard one_at_a_time(*opening);
    const std::pair key{wire.owner, wire.buffer_id};
    {
        std::lock_guard lock(all.mutex);
        // Mappings that went away with their context.
        std::erase_if(all.imported,
                      [](const auto& entry) { return range_at(entry.second.range->base) != entry.second.range; });
        if (const auto found = all.imported.find(key); found != all.imported.end()) {
            ++found->second.opened;
            *pointer = found->second.range->base;
            return success;
        }
    }
    RangeRef range;
    if (const Result result = map_in(context, wire, &range); result != success) {
        return result;
    }
    std::lock_guard lock(all.mutex);
    all.imported[key] = {range, 1};
    *pointer = range->base;
    return success;
}

// One opening less. False when others are left.
bool last_opening(const RangeRef& range) {
    Ipc& all = ipc();
    std::lock_guard lock(all.mutex);
    for (auto at = all.imported.begin(); at != all.imported.end(); ++at) {
        if (at->second.range == range) {
            if (--at->second.opened > 0) {
                return false;
            }
            all.imported.erase(at);
            return true;
        }
    }
    return true;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuIpcGetMemHandle(IpcMemHandle* handle, DevicePointer pointer) {
    return entry_in_context("cuIpcGetMemHandle", [&](const ContextRef&) {
        const RangeRef range = find_range(pointer);
        if (handle == nullptr || !range || range->kind != Kind::device) {
            return invalid_value;
        }
        WireHandle wire{};
        std::memcpy(wire.magic, magic, sizeof magic);
        wire.owner = control_name();
        wire.buffer_id = range->buffer_id;
        wire.length_bytes = range->length_bytes;
        wire.device = range->device;
        wire.checksum = checksum_of(wire);
        Ipc& all = ipc();
        std::lock_guard lock(all.mutex);
        if (!all.serving) {
            serve(ask_cuda_ipc, serve_memory);
            all.serving = true;
        }
        std::erase_if(all.exported, [](const auto& entry) { return entry.second.expired(); });
        all.exported[range->buffer_id] = range;
        std::memcpy(handle, &wire, sizeof wire);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuIpcOpenMemHandle(DevicePointer* pointer, IpcMemHandle handle, unsigned flags) {
    return entry_in_context("cuIpcOpenMemHandle",
                            [&](const ContextRef& context) { return open_handle(context, pointer, handle, flags); });
}

GDRKIT_CUDA_ENTRY Result cuIpcOpenMemHandle_v2(DevicePointer* pointer, IpcMemHandle handle, unsigned flags) {
    return entry_in_context("cuIpcOpenMemHandle_v2",
                            [&](const ContextRef& context) { return open_handle(context, pointer, handle, flags); });
}

GDRKIT_CUDA_ENTRY Result cuIpcCloseMemHandle(DevicePointer pointer) {
    return entry_in_context("cuIpcCloseMemHandle", [&](const ContextRef& context) {
        RangeRef range = range_at(pointer);
        if (range && range->kind != Kind::ipc) {
            return invalid_value;
        }
        if (range && !last_opening(range)) {
            return success;
        }
        synchronise(context);
        const Result taken = take_allocation(pointer, {Kind::ipc}, &range);
        if (taken == success) {
            give_slot(range->slot);
        }
        return taken;
    });
}

} // namespace gdrkit::twin::cuda
