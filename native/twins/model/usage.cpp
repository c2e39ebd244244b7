// Records the use of a twin for `gdrkit run`: maps the file of the run and fills the slot of this process.
// gdrkit/twin_run/usage.py reads the file.

#include "model/usage.hpp"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "model/sockets.hpp"

namespace gdrkit::twin {
namespace {

constexpr char expected_magic[8] = {'G', 'D', 'R', 'K', 'R', 'U', 'N', '1'};

// The file consists of a Header and `slot_count` Slots.
struct Header {
    char magic[8];
    std::uint32_t slot_bytes;
    std::uint32_t slot_count;
    char reserved[48];
};
static_assert(sizeof(Header) == 64);

// A process changes a free slot to claimed, fills the slot, and then changes the slot to ready.
enum class SlotState : std::uint32_t { free = 0, claimed = 1, ready = 2 };

struct Slot {
    std::atomic<SlotState> state;
    std::uint32_t api;
    std::uint32_t process_id;
    std::uint32_t reserved;
    std::atomic<std::uint64_t> object_count;
    std::atomic<std::uint64_t> moved_bytes;
    char program[64];
    // A forked child that destroys objects of its parent makes the numbers of its own slot negative.
    std::atomic<std::int64_t> queue_pair_count, region_count, region_bytes;
};
static_assert(sizeof(Slot) == 120 && std::atomic<std::uint64_t>::is_always_lock_free);

struct MappedFile {
    Slot* slots = nullptr;
    std::uint32_t slot_count = 0;
};

MappedFile map_file() {
    const char* const path = std::getenv("GDRKIT_TWINS_RUN");
    const Fd fd(path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    struct stat status {};
    if (!fd || fstat(fd.get(), &status) != 0 || status.st_size < static_cast<off_t>(sizeof(Header))) {
        return {};
    }
    const auto length_bytes = static_cast<std::size_t>(status.st_size);
    void* const memory = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (memory == MAP_FAILED) {
        return {};
    }
    Header header;
    std::memcpy(&header, memory, sizeof header);
    if (std::memcmp(header.magic, expected_magic, sizeof expected_magic) != 0 || header.slot_bytes != sizeof(Slot) ||
        header.slot_count != (length_bytes - sizeof header) / sizeof(Slot)) {
        munmap(memory, length_bytes);
        return {};
    }
    return {reinterpret_cast<Slot*>(static_cast<char*>(memory) + sizeof header), header.slot_count};
}

std::atomic<UsedApi> used_api{UsedApi::none};
std::atomic<Slot*> own_slot{nullptr};

// A forked child calls this function at once, and claims its own slot at its first use of the twin.
void forget_slot() {
    own_slot = nullptr;
}

// Claim a free slot for this process, or return nullptr if there is no file or no free slot.
Slot* claim_slot() {
    static const MappedFile file = [] {
        pthread_atfork(nullptr, nullptr, forget_slot);
        return map_file();
    }();
    for (std::uint32_t index = 0; index < file.slot_count; ++index) {
        Slot& slot = file.slots[index];
        SlotState expected_state = SlotState::free;
        if (slot.state.load(std::memory_order_relaxed) == expected_state &&
            slot.state.compare_exchange_strong(expected_state, SlotState::claimed)) {
            slot.api = static_cast<std::uint32_t>(used_api.load());
            slot.process_id = static_cast<std::uint32_t>(getpid());
            std::strncpy(slot.program, program_invocation_short_name, sizeof slot.program - 1);
            slot.state.store(SlotState::ready, std::memory_order_release);
            return &slot;
        }
    }
    return nullptr;
}

// Return the slot of this process, or nullptr if nothing is recorded. If two threads of a forked child claim slots at
// the same time, one of the slots stays without counts.
Slot* get_or_claim_slot() {
    Slot* current_slot = own_slot.load(std::memory_order_acquire);
    if (current_slot != nullptr || used_api.load(std::memory_order_relaxed) == UsedApi::none) {
        return current_slot;
    }
    static const bool has_file = std::getenv("GDRKIT_TWINS_RUN") != nullptr;
    Slot* const new_slot = has_file ? claim_slot() : nullptr;
    if (new_slot != nullptr && own_slot.compare_exchange_strong(current_slot, new_slot)) {
        return new_slot;
    }
    return current_slot;
}

bool shows_use(std::string_view kind) {
    switch (used_api.load(std::memory_order_relaxed)) {
    case UsedApi::cuda:
        return kind != "cuda_context" && kind != "cuda_primary_context";
    case UsedApi::cufile:
        return kind == "cufile_handle";
    case UsedApi::hlthunk:
        return kind == "gaudi_device";
    case UsedApi::verbs:
    case UsedApi::cuda_runtime_12:
    case UsedApi::cuda_runtime_13:
    case UsedApi::none:
        break;
    }
    return false;
}

void count_object() {
    if (Slot* const current_slot = get_or_claim_slot()) {
        current_slot->object_count.fetch_add(1, std::memory_order_relaxed);
    }
}

} // namespace

void record_use(UsedApi api) {
    used_api = api;
    get_or_claim_slot();
}

void record_object(std::string_view kind) {
    if (shows_use(kind)) {
        count_object();
    }
}

void record_ready_queue_pair() {
    count_object();
}

void record_queue_pairs(std::int64_t change) {
    if (Slot* const current_slot = get_or_claim_slot()) {
        current_slot->queue_pair_count.fetch_add(change, std::memory_order_relaxed);
    }
}

void record_regions(std::int64_t change, std::int64_t changed_bytes) {
    if (Slot* const current_slot = get_or_claim_slot()) {
        current_slot->region_count.fetch_add(change, std::memory_order_relaxed);
        current_slot->region_bytes.fetch_add(changed_bytes, std::memory_order_relaxed);
    }
}

void record_bytes(std::uint64_t length_bytes) {
    if (Slot* const current_slot = get_or_claim_slot()) {
        current_slot->moved_bytes.fetch_add(length_bytes, std::memory_order_relaxed);
    }
}

} // namespace gdrkit::twin
