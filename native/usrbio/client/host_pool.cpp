// The pool of host memory: its idle memory, its limits, and the thread that frees memory that has been idle for too
// long.
#include "usrbio/client/host_pool.hpp"

#include "usrbio/client/agent_protocol.hpp"
#include "usrbio/client/library_mutex.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/pools.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <list>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace gdrkit::usrbio {
namespace {

using Clock = std::chrono::steady_clock;

// The pool keeps no memory below this size, because the messages to the agent would take longer than the allocation of
// new pages.
constexpr std::size_t kept_bytes_min = std::size_t{4} << 20;
constexpr std::size_t host_idle_bytes_default = std::size_t{256} << 20;
constexpr std::chrono::seconds idle_time_max{3}; // The thread frees memory that has been idle for this time.
constexpr std::chrono::milliseconds host_check_interval{500}; // How often the thread checks the idle memory.

struct IdleMemory {
    KeptMemory kept;
    std::shared_ptr<AgentConnection> agent;
    int numa;
    Clock::time_point idle_since;
};

using IdleList = std::list<IdleMemory>;

struct HostPool {
    // These members are guarded by library_mutex(), which fork() locks.
    IdleList idle_memory; // The memory that has been idle longest is the first.
    std::size_t idle_bytes = 0;
    bool has_thread = false;

    // A thread that frees memory holds this mutex until the memory is free, so that trim_host_pool() can wait for it.
    // The thread locks this mutex before library_mutex().
    std::mutex freeing_mutex;
    std::atomic<std::uint64_t> freed_count{0};
};

// Returns the pool. It is never destroyed, because other threads may still use iovs when the process exits.
HostPool& host_pool() {
    static auto* instance = [] {
        auto* new_pool = new HostPool;
        // After fork(), the memory and its registrations still belong to the parent. The child unmaps the pages,
        // because the kernel could not free them as long as the child maps them. Then the child abandons its copies of
        // the objects, because a fork handler must not free heap memory.
        add_fork_handler([] {
            for (const IdleMemory& entry : host_pool().idle_memory) {
                munmap(entry.kept.memory->base(), entry.kept.memory->bytes());
                close(entry.kept.file.get());
            }
            new (&host_pool()) HostPool;
        });
        // Remove the names of the idle memory in /dev/shm at exit, because the agent may have been killed and
        // then cannot remove them. A signal handler may call exit() while the interrupted thread holds the mutex, so do
        // not wait for the mutex.
        std::atexit([] {
            const std::unique_lock lock(library_mutex(), std::try_to_lock);
            if (lock.owns_lock()) {
                for (const IdleMemory& entry : host_pool().idle_memory) {
                    entry.kept.memory->remove_name();
                }
            }
        });
        return new_pool;
    }();
    return *instance;
}

std::size_t read_idle_bytes_max() noexcept {
    static const std::size_t bytes_max = read_number_variable("GDRKIT_USRBIO_HOST_POOL_BYTES", host_idle_bytes_default);
    return bytes_max;
}

// Frees the idle memory for which `must_free` returns true. Calls `must_free` in the order of the list.
template <typename Condition> void free_idle_memory(HostPool& pool, const Condition& must_free) noexcept {
    const std::lock_guard freeing_lock(pool.freeing_mutex);
    IdleList removed_memory;
    {
        const std::lock_guard lock(library_mutex());
        for (auto entry = pool.idle_memory.begin(); entry != pool.idle_memory.end();) {
            const auto next = std::next(entry);
            if (must_free(*entry)) {
                pool.idle_bytes -= entry->kept.memory->bytes();
                removed_memory.splice(removed_memory.end(), pool.idle_memory, entry);
            }
            entry = next;
        }
    }
    for (const IdleMemory& entry : removed_memory) {
        drop_registration(entry.kept, *entry.agent);
        log_line(LogLevel::info, "host pool: frees %zu idle bytes", entry.kept.memory->bytes());
    }
    const std::size_t removed_count = removed_memory.size();
    removed_memory.clear();
    pool.freed_count += removed_count;
}

// Frees memory that has been idle for too long, and memory that no later iov can use. Runs in a thread while there is
// idle memory.
void free_expired_memory() {
    HostPool& pool = host_pool();
    for (bool has_memory = true; has_memory;) {
        std::this_thread::sleep_for(host_check_interval);
        const Clock::time_point expiry_cutoff = Clock::now() - idle_time_max;
        free_idle_memory(pool, [&](const IdleMemory& entry) {
            return entry.idle_since <= expiry_cutoff || entry.kept.memory->may_be_mapped_by_child() ||
                   !has_name(entry.kept);
        });
        const std::lock_guard lock(library_mutex());
        has_memory = pool.has_thread = !pool.idle_memory.empty();
    }
}

} // namespace

bool may_keep_host_memory(std::size_t size_bytes) noexcept {
    return size_bytes >= kept_bytes_min && size_bytes <= read_idle_bytes_max();
}

bool leaves_enough_shared_memory(int memory_fd, std::size_t size_bytes) noexcept {
    struct statvfs file_system {};
    if (fstatvfs(memory_fd, &file_system) != 0) {
        return false;
    }
    const HostPool& pool = host_pool();
    const std::lock_guard lock(library_mutex());
    const bool has_size_limit = file_system.f_blocks != 0; // A tmpfs without a size limit reports 0 blocks.
    return !has_size_limit || (pool.idle_bytes + size_bytes) / file_system.f_frsize <= file_system.f_bavail;
}

bool has_name(const KeptMemory& kept) noexcept {
    struct stat attributes {};
    return fstat(kept.file.get(), &attributes) == 0 && attributes.st_nlink != 0;
}

KeptMemory take_host_memory(const AgentConnection& agent, std::size_t size_bytes, int numa) noexcept {
    HostPool& pool = host_pool();
    IdleList taken_memory;
    const std::lock_guard lock(library_mutex());
    for (auto entry = pool.idle_memory.begin(); entry != pool.idle_memory.end(); ++entry) {
        if (entry->agent.get() == &agent && entry->kept.memory->bytes() == size_bytes && entry->numa == numa &&
            !entry->kept.memory->may_be_mapped_by_child()) {
            pool.idle_bytes -= size_bytes;
            taken_memory.splice(taken_memory.end(), pool.idle_memory, entry);
            return std::move(taken_memory.front().kept);
        }
    }
    return {};
}

void keep_host_memory(KeptMemory kept, std::shared_ptr<AgentConnection> agent, int numa) noexcept {
    HostPool& pool = host_pool();
    std::size_t bytes_max = read_idle_bytes_max();
    try {
        IdleList added_memory;
        added_memory.push_back({std::move(kept), std::move(agent), numa, Clock::now()});
        const std::lock_guard lock(library_mutex());
        pool.idle_bytes += added_memory.front().kept.memory->bytes();
        pool.idle_memory.splice(pool.idle_memory.end(), added_memory);
        pool.has_thread = pool.has_thread || start_pool_thread("hf3fs-iov-pool", free_expired_memory);
        // Without the thread, no memory may stay idle.
        bytes_max = pool.has_thread ? bytes_max : 0;
        if (pool.idle_bytes <= bytes_max) {
            return;
        }
    } catch (const std::bad_alloc&) {
        return; // The memory was freed. The agent ends the registration when the connection ends.
    }
    trim_host_pool(bytes_max);
}

void drop_registration(const KeptMemory& kept, AgentConnection& agent) noexcept {
    std::uint64_t reserved_flags = 0;
    const iovec payload{&reserved_flags, sizeof(reserved_flags)};
    const int memory_fd = kept.file.get();
    // Ignore the result: after an error, the agent ends the registration when the connection ends.
    static_cast<void>(agent.call(AgentRequest::drop_kept, {&payload, 1}, {&memory_fd, 1}, {}));
}

void trim_host_pool(std::size_t bytes_max) noexcept {
    HostPool& pool = host_pool();
    free_idle_memory(pool, [&](const IdleMemory&) { return pool.idle_bytes > bytes_max; });
}

std::uint64_t get_host_pool_freed_count() noexcept {
    return host_pool().freed_count;
}

} // namespace gdrkit::usrbio

extern "C" int gdrkit_host_pool_trim(std::size_t idle_bytes_max) {
    gdrkit::usrbio::trim_host_pool(idle_bytes_max);
    return 0;
}
