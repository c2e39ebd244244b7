// The GPU pool: its idle blocks, limits and statistics, and the thread that frees blocks that have been idle for too
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
using BlockList = std::list<std::unique_ptr<GpuBlock>>;

// Block sizes up to this limit are powers of two. Above it, there is one more size between two powers of two.
constexpr std::size_t power_of_two_block_bytes_max = 1 << 20;
constexpr std::size_t idle_bytes_default = std::size_t{256} << 20;
constexpr std::size_t idle_ms_default = 10000;
constexpr std::chrono::milliseconds check_interval_max{1000}; // Longest time between two checks of the idle blocks.

// library_mutex() guards all members. It is also locked during fork(), so a child gets a consistent pool.
struct Pool {
    BlockList idle_blocks;          // The longest idle block is the first.
    std::set<GpuBlock*> all_blocks; // Idle blocks, and blocks in use.
    std::size_t idle_bytes = 0, all_blocks_bytes = 0;
    std::size_t idle_bytes_max = 0;
    std::chrono::milliseconds idle_time_max{};
    // Counters of gdrkit_gpu_pool_statistics_t.
    std::uint64_t hit_count = 0, miss_count = 0, trimmed_block_count = 0, refused_block_count = 0;
    bool has_thread = false;
    std::condition_variable thread_wakeup;
};

// Returns the pool. It is never destroyed, because other threads may still use iovs when the process exits.
Pool& get_pool() {
    static auto* instance = [] {
        auto* new_pool = new Pool;
        new_pool->idle_bytes_max = read_number_variable("GDRKIT_USRBIO_GPU_POOL_BYTES", idle_bytes_default);
        new_pool->idle_time_max = std::chrono::milliseconds(
            std::min(read_number_variable("GDRKIT_USRBIO_GPU_POOL_IDLE_MS", idle_ms_default), std::size_t{1} << 31));
        // A child can use neither the memory nor the driver of its parent. So it abandons the objects of the old pool,
        // and keeps only the limits.
        add_fork_handler([] {
            for (GpuBlock* const block : get_pool().all_blocks) {
                block->close_in_child();
            }
            const std::size_t idle_bytes_max = get_pool().idle_bytes_max;
            const auto idle_time_max = get_pool().idle_time_max;
            Pool* const child_pool = new (&get_pool()) Pool;
            child_pool->idle_bytes_max = idle_bytes_max;
            child_pool->idle_time_max = idle_time_max;
        });
        return new_pool;
    }();
    return *instance;
}

std::size_t round_up_to_multiple(std::size_t bytes, std::size_t step_bytes) {
    return (bytes + step_bytes - 1) / step_bytes * step_bytes;
}

// Moves idle blocks to `removed_blocks`, beginning with the longest idle block, as long as `must_remove` returns true.
// The caller has locked library_mutex(), and destroys the blocks after the unlock.
template <typename Condition>
void move_idle_blocks(Pool& pool, BlockList& removed_blocks, const Condition& must_remove) {
    while (!pool.idle_blocks.empty() && must_remove(*pool.idle_blocks.front())) {
        pool.idle_bytes -= pool.idle_blocks.front()->block_bytes;
        ++pool.trimmed_block_count;
        removed_blocks.splice(removed_blocks.end(), pool.idle_blocks, pool.idle_blocks.begin());
    }
}

void log_trimmed(const BlockList& removed_blocks) {
    if (removed_blocks.empty()) {
        return;
    }
    const gdrkit_gpu_pool_statistics_t statistics = get_gpu_pool_statistics();
    log_line(LogLevel::info, "GPU pool: frees %zu idle blocks; %llu bytes stay idle, %llu are in use",
             removed_blocks.size(), static_cast<unsigned long long>(statistics.idle_bytes),
             static_cast<unsigned long long>(statistics.in_use_bytes));
}

// Returns whether less than a sixteenth of the memory of the device is free.
bool has_memory_pressure(int device) {
    PrimaryContext primary_context;
    if (primary_context.retain(*cuda::driver(), device) != 0) {
        return false;
    }
    const CurrentContext current_context(*cuda::driver(), primary_context.get());
    return current_context.error() == 0 && would_exhaust_memory(*cuda::driver(), 0);
}

// Frees the blocks that have been idle for too long, and all idle blocks if a device is short of memory. Runs in a
// thread while there are idle blocks.
void trim_until_empty() {
    std::unique_lock lock(library_mutex());
    Pool& pool = get_pool();
    while (!pool.idle_blocks.empty()) {
        const auto interval = std::clamp(pool.idle_time_max, std::chrono::milliseconds(1), check_interval_max);
        pool.thread_wakeup.wait_for(lock, interval);
        BlockList removed_blocks;
        const Clock::time_point expiry_cutoff = Clock::now() - pool.idle_time_max;
        move_idle_blocks(pool, removed_blocks,
                         [&](const GpuBlock& block) { return block.idle_since <= expiry_cutoff; });
        std::set<int> devices;
        for (const auto& block : pool.idle_blocks) {
            devices.insert(block->device);
        }
        lock.unlock();
        log_trimmed(removed_blocks);
        removed_blocks.clear();
        if (std::ranges::any_of(devices, has_memory_pressure)) {
            trim_gpu_pool(0);
        }
        lock.lock();
    }
    pool.has_thread = false;
}

// Starts the thread that trims the pool, unless the thread runs already. The caller has locked library_mutex().
void start_trim_thread(Pool& pool) {
    if (pool.has_thread) {
        return;
    }
    pool.has_thread = start_pool_thread("hf3fs-gpu-pool", trim_until_empty);
    if (!pool.has_thread) {
        log_line(LogLevel::warning,
                 "GPU pool: no thread can be started, so idle blocks are freed only above the limit of idle bytes");
    }
}

} // namespace

std::size_t choose_pool_block_bytes(std::size_t size_bytes) noexcept {
    const std::size_t bytes = round_up_to_multiple(size_bytes, rdma_page_bytes);
    if (bytes <= power_of_two_block_bytes_max) {
        return std::bit_ceil(bytes);
    }
    return round_up_to_multiple(bytes, std::bit_floor(bytes - 1) / 2);
}

bool may_use_gpu_pool(std::size_t size_bytes) noexcept {
    Pool& pool = get_pool();
    const std::lock_guard lock(library_mutex());
    return size_bytes <= pool.idle_bytes_max && choose_pool_block_bytes(size_bytes) <= pool.idle_bytes_max;
}

std::unique_ptr<GpuBlock> take_block(const AgentConnection& agent, int device, std::size_t size_bytes) noexcept {
    Pool& pool = get_pool();
    const std::size_t needed_bytes = round_up_to_multiple(size_bytes, rdma_page_bytes);
    for (;;) {
        std::unique_ptr<GpuBlock> block;
        {
            const std::lock_guard lock(library_mutex());
            // Take the smallest block that is large enough, but at most about twice as large as needed.
            auto best_entry = pool.idle_blocks.end();
            for (auto entry = pool.idle_blocks.begin(); entry != pool.idle_blocks.end(); ++entry) {
                const GpuBlock& candidate = **entry;
                if (candidate.keeping_agent.get() == &agent && candidate.device == device &&
                    candidate.block_bytes >= needed_bytes && candidate.block_bytes / 2 <= needed_bytes &&
                    (best_entry == pool.idle_blocks.end() || candidate.block_bytes < (*best_entry)->block_bytes)) {
                    best_entry = entry;
                }
            }
            if (best_entry == pool.idle_blocks.end()) {
                ++pool.miss_count;
                return nullptr;
            }
            block = std::move(*best_entry);
            pool.idle_blocks.erase(best_entry);
            pool.idle_bytes -= block->block_bytes;
        }
        if (block->is_intact()) {
            const std::lock_guard lock(library_mutex());
            ++pool.hit_count;
            return block;
        }
        // The application has reset the context, which freed the memory. So destroy this block, whose destructor ends
        // the registration, and try the next block.
    }
}

void keep_block(std::unique_ptr<GpuBlock> block, std::shared_ptr<AgentConnection> agent) noexcept {
    block->keeping_agent = std::move(agent);
    if (block->clear() != 0) {
        count_refused_block();
        return;
    }
    block->idle_since = Clock::now();
    BlockList removed_blocks;
    try {
        BlockList added_block; // A list, because push_back() may throw but splice() cannot.
        added_block.push_back(std::move(block));
        Pool& pool = get_pool();
        const std::lock_guard lock(library_mutex());
        pool.idle_bytes += added_block.front()->block_bytes;
        pool.idle_blocks.splice(pool.idle_blocks.end(), added_block);
        move_idle_blocks(pool, removed_blocks, [&](const GpuBlock&) { return pool.idle_bytes > pool.idle_bytes_max; });
        if (!pool.idle_blocks.empty()) {
            start_trim_thread(pool);
        }
    } catch (const std::bad_alloc&) {
        count_refused_block();
    }
    log_trimmed(removed_blocks);
}

void count_refused_block() noexcept {
    Pool& pool = get_pool();
    const std::lock_guard lock(library_mutex());
    ++pool.refused_block_count;
}

std::size_t trim_gpu_pool(std::size_t bytes_max) noexcept {
    Pool& pool = get_pool();
    BlockList removed_blocks;
    {
        const std::lock_guard lock(library_mutex());
        move_idle_blocks(pool, removed_blocks, [&](const GpuBlock&) { return pool.idle_bytes > bytes_max; });
    }
    log_trimmed(removed_blocks);
    return removed_blocks.size();
}

void set_gpu_pool_limits(std::size_t idle_bytes_max, unsigned idle_ms_max) noexcept {
    Pool& pool = get_pool();
    {
        const std::lock_guard lock(library_mutex());
        pool.idle_bytes_max = idle_bytes_max;
        pool.idle_time_max = std::chrono::milliseconds(idle_ms_max);
        pool.thread_wakeup.notify_all();
    }
    trim_gpu_pool(idle_bytes_max);
}

gdrkit_gpu_pool_statistics_t get_gpu_pool_statistics() noexcept {
    Pool& pool = get_pool();
    const std::lock_guard lock(library_mutex());
    return {.idle_bytes_max = pool.idle_bytes_max,
            .idle_blocks = pool.idle_blocks.size(),
            .idle_bytes = pool.idle_bytes,
            .in_use_blocks = pool.all_blocks.size() - pool.idle_blocks.size(),
            .in_use_bytes = pool.all_blocks_bytes - pool.idle_bytes,
            .hits = pool.hit_count,
            .misses = pool.miss_count,
            .trimmed_blocks = pool.trimmed_block_count,
            .refused_blocks = pool.refused_block_count};
}

void record_block(GpuBlock& block) {
    Pool& pool = get_pool();
    const std::lock_guard lock(library_mutex());
    pool.all_blocks.insert(&block);
    pool.all_blocks_bytes += block.block_bytes;
}

void forget_block(GpuBlock& block) noexcept {
    Pool& pool = get_pool();
    const std::lock_guard lock(library_mutex());
    if (pool.all_blocks.erase(&block) != 0) { // A forked child has forgotten the blocks of its parent.
        pool.all_blocks_bytes -= block.block_bytes;
    }
}

} // namespace gdrkit::usrbio
