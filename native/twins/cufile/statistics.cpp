// Implements cuFileGetStats* and counts the statistics. Level 1 has counters of operations, bytes and times, level 2
// adds histograms of the sizes, and level 3 adds counters for each GPU.

#include "cufile/statistics.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "cufile/driver.hpp"
#include "cufile/entry.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::cufile {
namespace {

struct Statistics {
    std::mutex mutex;
    int level = 0;
    bool is_level_set_by_call = false;
    bool is_started = false;
    StatsLevel3 counters{};
};

Statistics& statistics() {
    static auto* const instance = new Statistics;
    return *instance;
}

constexpr int max_level = 3;
constexpr std::uint64_t us_per_s = 1'000'000;

std::uint64_t compute_rate_per_s(std::uint64_t amount, std::uint64_t duration_us) {
    return duration_us == 0
               ? 0
               : static_cast<std::uint64_t>(static_cast<double>(amount) * us_per_s / static_cast<double>(duration_us));
}

// Return the index of the bin in the histograms of sizes: 0 for less than 1 KiB, then one bin for each power of two.
std::size_t find_histogram_bin(std::size_t length_bytes) {
    const std::size_t bin = static_cast<std::size_t>(std::bit_width(length_bytes / 1024));
    return std::min<std::size_t>(bin, histogram_bins - 1);
}

// Add a transfer to the counters of one type of call: operations, bytes, sum of the durations, and the average and the
// rates that are computed from these numbers.
void add_transfer(OpCounter* ops, std::uint64_t* bytes, std::uint64_t* bytes_per_s, std::uint64_t* latency_average_us,
                  std::uint64_t* ops_per_s, std::uint64_t* latency_sum_us, const TransferRecord& record) {
    if (record.result < 0) {
        ++ops->err;
        return;
    }
    ++ops->ok;
    *bytes += static_cast<std::uint64_t>(record.result);
    *latency_sum_us += static_cast<std::uint64_t>(record.duration.count());
    *latency_average_us = *latency_sum_us / ops->ok;
    *bytes_per_s = compute_rate_per_s(*bytes, *latency_sum_us);
    *ops_per_s = compute_rate_per_s(ops->ok, *latency_sum_us);
}

// Return whether the statistics count the transfer as part of a batch. Vectored calls are batches inside cuFile.
bool is_batch_transfer(const TransferRecord& record) {
    return record.call_type == CallType::batch || record.call_type == CallType::vector;
}

void count_at_level_1(StatsLevel1* basic, const TransferRecord& record) {
    if (is_batch_transfer(record)) {
        (record.is_write ? basic->batch_write_bytes : basic->batch_read_bytes) +=
            static_cast<std::uint64_t>(std::max<ssize_t>(record.result, 0));
    } else if (record.is_write) {
        add_transfer(&basic->write_ops, &basic->write_bytes, &basic->write_bw, &basic->write_latency_average_us,
                     &basic->write_ops_per_s, &basic->write_latency_sum_us, record);
    } else {
        add_transfer(&basic->read_ops, &basic->read_bytes, &basic->read_bw, &basic->read_latency_average_us,
                     &basic->read_ops_per_s, &basic->read_latency_sum_us, record);
    }
}

// Return the counter of the successful transfers that took the route of this transfer.
std::uint64_t* find_route_counter(GpuStats* gpu, const TransferRecord& record) {
    switch (record.route) {
    case Route::p2p:
        return record.is_write ? &gpu->p2p_writes : &gpu->p2p_reads;
    case Route::nvfs:
        return record.is_write ? &gpu->nvfs_writes : &gpu->nvfs_reads;
    case Route::posix:
        break;
    }
    return record.is_write ? &gpu->posix_writes : &gpu->posix_reads;
}

void count_on_gpu(GpuStats* gpu, const TransferRecord& record) {
    ++(record.is_write ? gpu->total_writes : gpu->total_reads);
    if (record.result < 0) {
        ++(record.is_write ? gpu->write_errors : gpu->read_errors);
        return;
    }
    const auto duration_us = static_cast<std::uint64_t>(record.duration.count());
    (record.is_write ? gpu->write_bytes : gpu->read_bytes) += static_cast<std::uint64_t>(record.result);
    (record.is_write ? gpu->write_duration_us : gpu->read_duration_us) += duration_us;
    gpu->read_bw = compute_rate_per_s(gpu->read_bytes, gpu->read_duration_us);
    gpu->write_bw = compute_rate_per_s(gpu->write_bytes, gpu->write_duration_us);
    ++*find_route_counter(gpu, record);
    if (record.is_unaligned) {
        ++(record.is_write ? gpu->unaligned_writes : gpu->unaligned_reads);
    }
}

// Return the counters of a device; null for host memory or a device beyond the table. The caller holds the lock.
GpuStats* get_gpu_counters(Statistics* all_statistics, int device) {
    return device < 0 || device >= max_gpus ? nullptr : &all_statistics->counters.gpus[device];
}

// Copy the first `size_bytes` bytes of the level 3 structure. In a cuFile version without vectored calls, the level 1
// structure has no counters of these calls, and the fields of level 2 follow without a gap. So skip these counters.
void copy_layout_of_version(const StatsLevel3& counters, void* destination, std::size_t size_bytes) {
    constexpr std::size_t vector_counters_begin = offsetof(StatsLevel1, readv_ops),
                          vector_counters_end = sizeof(StatsLevel1);
    if (config().cufile_version >= first_version_with_vectors) {
        std::memcpy(destination, &counters, size_bytes);
        return;
    }
    std::memcpy(destination, &counters, vector_counters_begin);
    std::memcpy(static_cast<std::byte*>(destination) + vector_counters_begin,
                reinterpret_cast<const std::byte*>(&counters) + vector_counters_end, size_bytes - vector_counters_end);
}

// Copy the statistics of a level. The level 3 structure begins with the level 2 structure, which begins with the level
// 1 structure. So the structure of each level is the first `size_bytes` bytes of the level 3 structure.
Error copy_statistics(std::string_view symbol, int level, void* destination, std::size_t size_bytes) {
    return run_entry(symbol, [&] {
        require_open_driver();
        Statistics& all_statistics = statistics();
        const auto uuids = get_device_uuids();
        std::lock_guard lock(all_statistics.mutex);
        if (destination == nullptr || all_statistics.level < level) {
            throw CufileError{invalid_value};
        }
        all_statistics.counters.gpu_count = static_cast<std::uint32_t>(std::min<std::size_t>(uuids.size(), max_gpus));
        for (std::uint32_t gpu = 0; gpu < all_statistics.counters.gpu_count; ++gpu) {
            std::memcpy(all_statistics.counters.gpus[gpu].uuid, uuids[gpu].data(), uuids[gpu].size());
        }
        copy_layout_of_version(all_statistics.counters, destination, size_bytes);
    });
}

} // namespace

void count_transfer(const TransferRecord& record) {
    Statistics& all_statistics = statistics();
    std::lock_guard lock(all_statistics.mutex);
    if (!all_statistics.is_started) {
        return;
    }
    count_at_level_1(&all_statistics.counters.detailed.basic, record);
    if (record.result >= 0) {
        auto& histogram = record.is_write ? all_statistics.counters.detailed.write_size_kb_hist
                                          : all_statistics.counters.detailed.read_size_kb_hist;
        ++histogram[find_histogram_bin(static_cast<std::size_t>(record.result))];
    }
    // The counters of a GPU do not include the transfers of batches (observed with cuFile 1.15 and 1.20).
    if (GpuStats* const gpu = is_batch_transfer(record) ? nullptr : get_gpu_counters(&all_statistics, record.device)) {
        count_on_gpu(gpu, record);
    }
}

void count_vectored_call(const TransferRecord& record) {
    count_operation(&StatsLevel1::batch_complete_ops, record.result >= 0);
    Statistics& all_statistics = statistics();
    std::lock_guard lock(all_statistics.mutex);
    if (!all_statistics.is_started) {
        return;
    }
    StatsLevel1& basic = all_statistics.counters.detailed.basic;
    if (record.is_write) {
        add_transfer(&basic.writev_ops, &basic.writev_bytes, &basic.writev_bw, &basic.writev_latency_average_us,
                     &basic.writev_ops_per_s, &basic.writev_latency_sum_us, record);
    } else {
        add_transfer(&basic.readv_ops, &basic.readv_bytes, &basic.readv_bw, &basic.readv_latency_average_us,
                     &basic.readv_ops_per_s, &basic.readv_latency_sum_us, record);
    }
}

void count_registration(int device, std::size_t length_bytes, bool is_registration, bool is_success) {
    count_operation(is_registration ? &StatsLevel1::buffer_register_ops : &StatsLevel1::buffer_deregister_ops,
                    is_success);
    Statistics& all_statistics = statistics();
    std::lock_guard lock(all_statistics.mutex);
    GpuStats* const gpu = all_statistics.is_started ? get_gpu_counters(&all_statistics, device) : nullptr;
    if (gpu == nullptr) {
        return;
    }
    if (is_registration) {
        ++gpu->maps;
        ++(is_success ? gpu->maps_ok : gpu->map_errors);
        gpu->registered_bytes += is_success ? length_bytes : 0;
    } else if (is_success) {
        ++gpu->unmaps;
        gpu->registered_bytes -= std::min<std::uint64_t>(gpu->registered_bytes, length_bytes);
    }
}

void count_operation(OpCounter StatsLevel1::*counter, bool is_success) {
    Statistics& all_statistics = statistics();
    std::lock_guard lock(all_statistics.mutex);
    if (all_statistics.is_started) {
        OpCounter& ops = all_statistics.counters.detailed.basic.*counter;
        ++(is_success ? ops.ok : ops.err);
    }
}

void count_batch_submission(Route route) {
    count_operation(&StatsLevel1::batch_total_submit_ops, true);
    if (route == Route::p2p) {
        count_operation(&StatsLevel1::batch_p2p_submit_ops, true);
    } else if (route == Route::nvfs) {
        count_operation(&StatsLevel1::batch_nvfs_submit_ops, true);
    } else {
        // For a transfer through the host the real library increments only the counter of the kernel's asynchronous
        // I/O.
        count_operation(&StatsLevel1::batch_aio_submit_ops, true);
    }
}

void set_default_level(int level) {
    Statistics& all_statistics = statistics();
    std::lock_guard lock(all_statistics.mutex);
    if (!all_statistics.is_level_set_by_call && level >= 0 && level <= max_level) {
        all_statistics.level = level;
        // With a default level above 0, counting starts at once, without cuFileStatsStart.
        all_statistics.is_started = level > 0;
    }
}

GDRKIT_CUFILE_ENTRY Error cuFileSetStatsLevel(int level) {
    return run_entry("cuFileSetStatsLevel", [&] {
        if (level < 0 || level > max_level) {
            throw CufileError{invalid_value};
        }
        Statistics& all_statistics = statistics();
        std::lock_guard lock(all_statistics.mutex);
        all_statistics.level = level;
        all_statistics.is_level_set_by_call = true;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsLevel(int* level) {
    return run_entry("cuFileGetStatsLevel", [&] {
        if (level == nullptr) {
            throw CufileError{invalid_value};
        }
        Statistics& all_statistics = statistics();
        std::lock_guard lock(all_statistics.mutex);
        *level = all_statistics.level;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileStatsStart() {
    return run_entry("cuFileStatsStart", [] {
        require_open_driver();
        Statistics& all_statistics = statistics();
        std::lock_guard lock(all_statistics.mutex);
        if (all_statistics.level == 0) {
            throw CufileError{invalid_value};
        }
        all_statistics.is_started = true;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileStatsStop() {
    return run_entry("cuFileStatsStop", [] {
        require_open_driver();
        Statistics& all_statistics = statistics();
        std::lock_guard lock(all_statistics.mutex);
        all_statistics.is_started = false;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileStatsReset() {
    return run_entry("cuFileStatsReset", [] {
        require_open_driver();
        Statistics& all_statistics = statistics();
        std::lock_guard lock(all_statistics.mutex);
        all_statistics.counters = {};
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL1(StatsLevel1* statistics) {
    return copy_statistics("cuFileGetStatsL1", 1, statistics, sizeof *statistics);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL2(StatsLevel2* statistics) {
    return copy_statistics("cuFileGetStatsL2", 2, statistics, sizeof *statistics);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL3(StatsLevel3* statistics) {
    return copy_statistics("cuFileGetStatsL3", 3, statistics, sizeof *statistics);
}

} // namespace gdrkit::twin::cufile
