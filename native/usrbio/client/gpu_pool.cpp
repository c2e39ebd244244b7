// The idle blocks of the GPU pool, its limits and statistics, and the thread that frees blocks that are idle for too
// long.
#include "usrbio/client/gpu_pool.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "usrbio/client/gpu_block.hpp"
#include "usrbio/client/library_mutex.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/pools.hpp"

namespace gdrkit::usrbio {
namespace {

using Clock = std::chrono::steady_clock;
using Blocks = std::list<std::unique_ptr<GpuBlock>>;

constexpr std::size_t page_bytes = 65536; // The page in which nvidia-peermem pins device memory.
constexpr std::size_t fine_steps_above_bytes = 1 << 20;
constexpr std::size_t idle_bytes_default = std::size_t{256} << 20;
constexpr std::size_t idle_ms_default = 10000;
constexpr std::chrono::milliseconds check_interval{1000}; // How often the thread checks the idle blocks.

// All members are guarded by library_mutex(), which fork() locks.
struct Pool {
    Blocks idle;                // The longest idle block is the first.
    std::set<GpuBlock*> blocks; // Idle blocks, and blocks in use.
    std::size_t idle_bytes = 0, blocks_bytes = 0;
    std::size_t idle_bytes_max = 0;
    std::chrono::milliseconds idle_time_max{};
    std::uint64_t hits = 0, misses = 0, trimmed = 0, refused = 0;
    bool has_thread = false;
    std::condition_variable thread_wakeup;
};

// Returns the pool. It is never destroyed, because other threads may still use iovs when the process exits.
Pool& pool() {
    static auto* instance = [] {
        auto* new_pool = new Pool;
        new_pool->idle_bytes_max = read_number_variable("GDRKIT_USRBIO_GPU_POOL_BYTES", idle_bytes_default);
        new_pool->idle_time_max = std::chrono::milliseconds(
            std::min(read_number_variable("GDRKIT_USRBIO_GPU_POOL_IDLE_MS", idle_ms_default), std::size_t{1} << 31));
        // A child can use neither the memory nor the driver of its parent. The old objects are abandoned.
        add_fork_handler([] {
            for (GpuBlock* const block : pool().blocks) {
                block->close_in_child();
            }
            const std::size_t idle_bytes_max = pool().idle_bytes_max;
            const auto idle_time_max = pool().idle_time_max;
            Pool* const child_pool = new (&pool()) Pool;
            child_pool->idle_bytes_max = idle_bytes_max;
            child_pool->idle_time_max = idle_time_max;
        });
        return new_pool;
    }();
    return *instance;
}

std::size_t round_up_to_block(std::size_t bytes, std::size_t step_bytes) {
    return (bytes + step_bytes - 1) / step_bytes * step_bytes;
}

// Moves idle blocks, the longest idle one first, to `removed`, while `is_removed` returns true. The caller has locked
// library_mutex(), and destroys the blocks after the unlock.
template <typename Condition> void move_idle_blocks(Pool& state, Blocks& removed, const Condition& is_removed) {
    while (!state.idle.empty() && is_removed(*state.idle.front())) {
        state.idle_bytes -= state.idle.front()->block_bytes;
        ++state.trimmed;
        removed.splice(removed.end(), state.idle, state.idle.begin());
    }
}

void log_trimmed(const Blocks& removed) {
    if (removed.empty()) {
        return;
    }
    const gdrkit_gpu_pool_statistics_t statistics = get_pool_statistics();
    log_line(LogLevel::info, "GPU pool: frees %zu idle blocks; %llu bytes stay idle, %llu are in use", removed.size(),
             static_cast<unsigned long long>(statistics.idle_bytes),
             static_cast<unsigned long long>(statistics.in_use_bytes));
}

bool has_memory_pressure(int device) {
    PrimaryContext primary;
    if (primary.retain(*cuda::driver(), device) != 0) {
        return false;
    }
    const CurrentContext current(*cuda::driver(), primary.get());
    return current.error() == 0 && would_exhaust_memory(*cuda::driver(), 0);
}

// Frees the blocks that have been idle for too long, and all blocks if a device is short of memory. Runs in a thread
// while there are idle blocks.
void trim_until_empty() {
    std::unique_lock lock(library_mutex());
    Pool& state = pool();
    while (!state.idle.empty()) {
        const auto interval = std::clamp(state.idle_time_max, std::chrono::milliseconds(1), check_interval);
        state.thread_wakeup.wait_for(lock, interval);
        Blocks removed;
        const Clock::time_point expiry = Clock::now() - state.idle_time_max;
        move_idle_blocks(state, removed, [&](const GpuBlock& block) { return block.idle_since <= expiry; });
        std::set<int> devices;
        for (const auto& block : state.idle) {
            devices.insert(block->device);
        }
        lock.unlock();
        log_trimmed(removed);
        removed.clear();
        if (std::ranges::any_of(devices, has_memory_pressure)) {
            trim_pool(0);
        }
        lock.lock();
    }
    state.has_thread = false;
}

// Starts the thread that trims the pool, unless it runs. The caller has locked library_mutex().
void start_thread(Pool& state) {
    if (state.has_thread) {
        return;
    }
    state.has_thread = start_pool_thread("hf3fs-gpu-pool", trim_until_empty);
    if (!state.has_thread) {
        log_line(LogLevel::warning, "GPU pool: no thread can be started, so idle blocks are freed only at the limit");
    }
}

} // namespace

std::size_t choose_pool_block_bytes(std::size_t size_bytes) noexcept {
    const std::size_t bytes = round_up_to_block(size_bytes, page_bytes);
    if (bytes <= fine_steps_above_bytes) {
        return std::bit_ceil(bytes);
    }
    return round_up_to_block(bytes, std::bit_floor(bytes - 1) / 2);
}

bool may_use_pool(std::size_t size_bytes) noexcept {
    Pool& state = pool();
    const std::lock_guard lock(library_mutex());
    return size_bytes <= state.idle_bytes_max && choose_pool_block_bytes(size_bytes) <= state.idle_bytes_max;
}

std::unique_ptr<GpuBlock> take_block(const AgentConnection& agent, int device, std::size_t size_bytes) noexcept {
    Pool& state = pool();
    const std::size_t needed_bytes = round_up_to_block(size_bytes, page_bytes);
    for (;;) {
        std::unique_ptr<GpuBlock> block;
        {
            const std::lock_guard lock(library_mutex());
            auto best = state.idle.end();
            for (auto entry = state.idle.begin(); entry != state.idle.end(); ++entry) {
                const GpuBlock& candidate = **entry;
                if (candidate.keeping_agent.get() == &agent && candidate.device == device &&
                    candidate.block_bytes >= needed_bytes && candidate.block_bytes / 2 <= needed_bytes &&
                    (best == state.idle.end() || candidate.block_bytes < (*best)->block_bytes)) {
                    best = entry;
                }
            }
            if (best == state.idle.end()) {
                ++state.misses;
                return nullptr;
            }
            block = std::move(*best);
            state.idle.erase(best);
            state.idle_bytes -= block->block_bytes;
        }
        if (block->is_intact()) {
            const std::lock_guard lock(library_mutex());
            ++state.hits;
            return block;
        }
    } // The application has reset the context. The destructor of the block ends the registration.
}

void keep_block(std::unique_ptr<GpuBlock> block, std::shared_ptr<AgentConnection> agent) noexcept {
    block->keeping_agent = std::move(agent);
    if (block->clear() != 0) {
        count_refused_block();
        return;
    }
    block->idle_since = Clock::now();
    Blocks removed;
    try {
        Blocks added;
        added.push_back(std::move(block));
        Pool& state = pool();
        const std::lock_guard lock(library_mutex());
        state.idle_bytes += added.front()->block_bytes;
        state.idle.splice(state.idle.end(), added);
        move_idle_blocks(state, removed, [&](const GpuBlock&) { return state.idle_bytes > state.idle_bytes_max; });
        if (!state.idle.empty()) {
            start_thread(state);
        }
    } catch (const std::bad_alloc&) {
        count_refused_block();
    }
    log_trimmed(removed);
}

void count_refused_block() noexcept {
    Pool& state = pool();
    const std::lock_guard lock(library_mutex());
    ++state.refused;
}

std::size_t trim_pool(std::size_t bytes_max) noexcept {
    Pool& state = pool();
    Blocks removed;
    {
        const std::lock_guard lock(library_mutex());
        move_idle_blocks(state, removed, [&](const GpuBlock&) { return state.idle_bytes > bytes_max; });
    }
    log_trimmed(removed);
    return removed.size();
}

void set_pool_limits(std::size_t idle_bytes_max, unsigned idle_ms_max) noexcept {
    Pool& state = pool();
    {
        const std::lock_guard lock(library_mutex());
        state.idle_bytes_max = idle_bytes_max;
        state.idle_time_max = std::chrono::milliseconds(idle_ms_max);
        state.thread_wakeup.notify_all();
    }
    trim_pool(idle_bytes_max);
}

gdrkit_gpu_pool_statistics_t get_pool_statistics() noexcept {
    Pool& state = pool();
    const std::lock_guard lock(library_mutex());
    return {.idle_bytes_max = state.idle_bytes_max,
            .idle_blocks = state.idle.size(),
            .idle_bytes = state.idle_bytes,
            .in_use_blocks = state.blocks.size() - state.idle.size(),
            .in_use_bytes = state.blocks_bytes - state.idle_bytes,
            .hits = state.hits,
            .misses = state.misses,
            .trimmed_blocks = state.trimmed,
            .refused_blocks = state.refused};
}

void add_block(GpuBlock& block) {
    Pool& state = pool();
    const std::lock_guard lock(library_mutex());
    state.blocks.insert(&block);
    state.blocks_bytes += block.block_bytes;
}

void remove_block(GpuBlock& block) noexcept {
    Pool& state = pool();
    const std::lock_guard lock(library_mutex());
    if (state.blocks.erase(&block) != 0) { // A forked child has forgotten the blocks of its parent.
        state.blocks_bytes -= block.block_bytes;
    }
}

} // namespace gdrkit::usrbio
