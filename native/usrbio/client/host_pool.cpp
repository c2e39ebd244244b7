// The idle memory of the pool, its limits, and the thread that frees memory that is idle for too long.
#include "usrbio/client/host_pool.hpp"

#include "common/descriptor.hpp"
#include "usrbio/client/agent_protocol.hpp"
#include "usrbio/client/library_mutex.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/pools.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <chrono>
#include <list>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace gdrkit::usrbio {
namespace {

using Clock = std::chrono::steady_clock;

// Below this size, the pages cost less than the messages to the agent.
constexpr std::size_t size_bytes_min = std::size_t{4} << 20;
constexpr std::size_t host_idle_bytes_default = std::size_t{256} << 20;
constexpr std::chrono::seconds idle_time_max{3};
constexpr std::chrono::milliseconds host_check_interval{500}; // How often the thread checks the idle memory.

struct IdleMemory {
    std::shared_ptr<SharedMemory> memory;
    std::shared_ptr<AgentConnection> agent;
    int numa;
    Clock::time_point idle_since;
};

using IdleList = std::list<IdleMemory>;

// All members are guarded by library_mutex(), which fork() locks.
struct HostPool {
    IdleList idle; // The memory that has been idle longest is the first.
    std::size_t idle_bytes = 0;
    bool has_thread = false;
};

// Returns the pool. It is never destroyed, because other threads may still use iovs when the process exits.
HostPool& host_pool() {
    static auto* instance = [] {
        auto* new_pool = new HostPool;
        // The memory and its registrations belong to the parent. The child unmaps the pages, so that it does not keep
        // them from being freed, and abandons its objects.
        add_fork_handler([] {
            for (const IdleMemory& entry : host_pool().idle) {
                munmap(entry.memory->base(), entry.memory->bytes());
            }
            new (&host_pool()) HostPool;
        });
        return new_pool;
    }();
    return *instance;
}

std::size_t idle_bytes_max() noexcept {
    static const std::size_t bytes_max =
        number_from_environment("GDRKIT_USRBIO_HOST_POOL_BYTES", host_idle_bytes_default);
    return bytes_max;
}

// Moves idle memory to `removed`, the longest idle first, while `is_removed` returns true. The caller has locked
// library_mutex().
template <typename Condition> void move_idle(HostPool& all, IdleList& removed, const Condition& is_removed) {
    while (!all.idle.empty() && is_removed(all.idle.front())) {
        all.idle_bytes -= all.idle.front().memory->bytes();
        removed.splice(removed.end(), all.idle, all.idle.begin());
    }
}

void drop_registrations(const IdleList& removed) noexcept {
    for (const IdleMemory& entry : removed) {
        drop_registration(*entry.memory, *entry.agent);
        log_line(LogLevel::info, "host pool: frees %zu idle bytes", entry.memory->bytes());
    }
}

// Frees memory that has been idle for too long. Runs in a thread while there is idle memory.
void free_expired_memory() {
    HostPool& all = host_pool();
    std::unique_lock lock(library_mutex());
    while (!all.idle.empty()) {
        lock.unlock();
        std::this_thread::sleep_for(host_check_interval);
        lock.lock();
        IdleList removed;
        const Clock::time_point expiry = Clock::now() - idle_time_max;
        move_idle(all, removed, [&](const IdleMemory& entry) {
            return entry.idle_since <= expiry || entry.memory->may_be_mapped_by_child();
        });
        lock.unlock();
        drop_registrations(removed);
        removed.clear();
        lock.lock();
    }
    all.has_thread = false;
}

} // namespace

bool may_keep_host_memory(std::size_t size_bytes) noexcept {
    return size_bytes >= size_bytes_min && size_bytes <= idle_bytes_max();
}

std::shared_ptr<SharedMemory> take_host_memory(const AgentConnection& agent, std::size_t size_bytes,
                                               int numa) noexcept {
    HostPool& all = host_pool();
    IdleList taken;
    const std::lock_guard lock(library_mutex());
    for (auto entry = all.idle.begin(); entry != all.idle.end(); ++entry) {
        if (entry->agent.get() == &agent && entry->memory->bytes() == size_bytes && entry->numa == numa &&
            !entry->memory->may_be_mapped_by_child()) {
            all.idle_bytes -= size_bytes;
            taken.splice(taken.end(), all.idle, entry);
            return std::move(taken.front().memory);
        }
    }
    return nullptr;
}

void keep_host_memory(std::shared_ptr<SharedMemory> memory, std::shared_ptr<AgentConnection> agent, int numa) noexcept {
    HostPool& all = host_pool();
    IdleList removed;
    try {
        IdleList added;
        added.push_back({std::move(memory), std::move(agent), numa, Clock::now()});
        const std::lock_guard lock(library_mutex());
        all.idle_bytes += added.front().memory->bytes();
        all.idle.splice(all.idle.end(), added);
        all.has_thread = all.has_thread || start_pool_thread("hf3fs-iov-pool", free_expired_memory);
        // Without the thread, no memory may stay idle.
        const std::size_t bytes_max = all.has_thread ? idle_bytes_max() : 0;
        move_idle(all, removed, [&](const IdleMemory&) { return all.idle_bytes > bytes_max; });
    } catch (const std::bad_alloc&) {
        // The agent ends the registration with the connection.
    }
    drop_registrations(removed);
}

void drop_registration(const SharedMemory& memory, AgentConnection& agent) noexcept {
    // The agent removes the name of memory whose registration it ends by itself.
    const Descriptor file(shm_open(memory.name().c_str(), O_RDWR, 0));
    std::uint64_t flags = 0;
    const iovec payload{&flags, sizeof(flags)};
    if (const int fd = file.get(); fd >= 0) {
        // After an error, the agent ends the registration with the connection.
        static_cast<void>(agent.call(AgentRequest::drop_kept, {&payload, 1}, {&fd, 1}, {}));
    }
}

bool trim_host_pool(std::size_t bytes_max) noexcept {
    HostPool& all = host_pool();
    IdleList removed;
    {
        const std::lock_guard lock(library_mutex());
        move_idle(all, removed, [&](const IdleMemory&) { return all.idle_bytes > bytes_max; });
    }
    drop_registrations(removed);
    return !removed.empty();
}

} // namespace gdrkit::usrbio

extern "C" int gdrkit_host_pool_trim(std::size_t idle_bytes_max) {
    gdrkit::usrbio::trim_host_pool(idle_bytes_max);
    return 0;
}
