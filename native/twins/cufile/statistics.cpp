// Statistics of levels 1 to 3: counting, and cuFileGetStats*.

#include "cufile/statistics.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "cufile/driver.hpp"
#include "cufile/entry.hpp"

namespace gdrkit::twin::cufile {
namespace {

struct Statistics {
    std::mutex mutex;
    int level = 0;
    bool level_set_by_call = false;
    bool started = false;
    StatsLevel3 counters{};
};

Statistics& statistics() {
    static auto* const all = new Statistics;
    return *all;
}

constexpr int max_level = 3;
constexpr std::uint64_t us_per_s = 1'000'000;

std::uint64_t per_second(std::uint64_t amount, std::uint64_t took_us) {
    return took_us == 0
               ? 0
               : static_cast<std::uint64_t>(static_cast<double>(amount) * us_per_s / static_cast<double>(took_us));
}

std::size_t bin_of(std::size_t length_bytes) {
    const std::size_t bin = static_cast<std::size_t>(std::bit_width(length_bytes / 1024));
    return std::min<std::size_t>(bin, histogram_bins - 1);
}

// Add a transfer to the counters of one type of call: operations, bytes, time, and the derived rates.
void add_transfer(OpCounter* ops, std::uint64_t* bytes, std::uint64_t* bandwidth, std::uint64_t* average_us,
                  std::uint64_t* ops_per_s, std::uint64_t* sum_us, const TransferRecord& record) {
    if (record.result < 0) {
        ++ops->err;
        return;
    }
    ++ops->ok;
    *bytes += static_cast<std::uint64_t>(record.result);
    *sum_us += static_cast<std::uint64_t>(record.duration.count());
    *average_us = *sum_us / ops->ok;
    *bandwidth = per_second(*bytes, *sum_us);
    *ops_per_s = per_second(ops->ok, *sum_us);
}

bool is_batch_transfer(const TransferRecord& record) {
    return record.call == Call::batch || record.call == Call::vector;
}

void count_basic(StatsLevel1* basic, const TransferRecord& record) {
    if (is_batch_transfer(record)) {
        (record.writing ? basic->batch_write_bytes : basic->batch_read_bytes) +=
            static_cast<std::uint64_t>(std::max<ssize_t>(record.result, 0));
    } else if (record.writing) {
        add_transfer(&basic->write_ops, &basic->write_bytes, &basic->write_bw, &basic->write_latency_average_us,
                     &basic->write_ops_per_s, &basic->write_latency_sum_us, record);
    } else {
        add_transfer(&basic->read_ops, &basic->read_bytes, &basic->read_bw, &basic->read_latency_average_us,
                     &basic->read_ops_per_s, &basic->read_latency_sum_us, record);
    }
}

std::uint64_t* route_counter(GpuStats* gpu, const TransferRecord& record) {
    switch (record.route) {
    case Route::p2p:
        return record.writing ? &gpu->p2p_writes : &gpu->p2p_reads;
    case Route::nvfs:
        return record.writing ? &gpu->nvfs_writes : &gpu->nvfs_reads;
    case Route::posix:
        break;
    }
    return record.writing ? &gpu->posix_writes : &gpu->posix_reads;
}

void count_on_gpu(GpuStats* gpu, const TransferRecord& record) {
    ++(record.writing ? gpu->total_writes : gpu->total_reads);
    if (record.result < 0) {
        ++(record.writing ? gpu->write_errors : gpu->read_errors);
        return;
    }
    const auto took_us = static_cast<std::uint64_t>(record.duration.count());
    (record.writing ? gpu->write_bytes : gpu->read_bytes) += static_cast<std::uint64_t>(record.result);
    (record.writing ? gpu->write_duration_us : gpu->read_duration_us) += took_us;
    gpu->read_bw = per_second(gpu->read_bytes, gpu->read_duration_us);
    gpu->write_bw = per_second(gpu->write_bytes, gpu->write_duration_us);
    ++*route_counter(gpu, record);
    if (record.unaligned) {
        ++(record.writing ? gpu->unaligned_writes : gpu->unaligned_reads);
    }
}

// Return the counters of a device; null for host memory or a device beyond the table. The caller holds the lock.
GpuStats* gpu_stats_of(Statistics* all, int device) {
    return device < 0 || device >= max_gpus ? nullptr : &all->counters.gpus[device];
}

// Copy the first `size` bytes of the level 3 structure, which begins with level 2, which begins with level 1.
Error copy_statistics(std::string_view symbol, int level, void* where, std::size_t size) {
    return entry(symbol, [&] {
        require_open();
        Statistics& all = statistics();
        const auto uuids = device_uuids();
        std::lock_guard lock(all.mutex);
        if (where == nullptr || all.level < level) {
            throw CufileError{invalid_value};
        }
        all.counters.gpu_count = static_cast<std::uint32_t>(std::min<std::size_t>(uuids.size(), max_gpus));
        for (std::uint32_t gpu = 0; gpu < all.counters.gpu_count; ++gpu) {
            std::memcpy(all.counters.gpus[gpu].uuid, uuids[gpu].data(), uuids[gpu].size());
        }
        std::memcpy(where, &all.counters, size);
    });
}

} // namespace

void count(const TransferRecord& record) {
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    if (!all.started) {
        return;
    }
    count_basic(&all.counters.detailed.basic, record);
    if (record.result >= 0) {
        auto& histogram = record.writing ? all.counters.detailed.write_size_kb : all.counters.detailed.read_size_kb;
        ++histogram[bin_of(static_cast<std::size_t>(record.result))];
    }
    // Per-GPU counters do not include batches, nor vectored calls, which are batches internally (observed with 1.15 and
    // 1.20).
    if (GpuStats* const gpu = is_batch_transfer(record) ? nullptr : gpu_stats_of(&all, record.device)) {
        count_on_gpu(gpu, record);
    }
}

void count_vectored_call(const TransferRecord& record) {
    count_operation(&StatsLevel1::batch_complete_ops, record.result >= 0);
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    if (!all.started) {
        return;
    }
    StatsLevel1& basic = all.counters.detailed.basic;
    if (record.writing) {
        add_transfer(&basic.writev_ops, &basic.writev_bytes, &basic.writev_bw, &basic.writev_latency_average_us,
                     &basic.writev_ops_per_s, &basic.writev_latency_sum_us, record);
    } else {
        add_transfer(&basic.readv_ops, &basic.readv_bytes, &basic.readv_bw, &basic.readv_latency_average_us,
                     &basic.readv_ops_per_s, &basic.readv_latency_sum_us, record);
    }
}

void count_registration(int device, std::size_t length_bytes, bool registered, bool ok) {
    count_operation(registered ? &StatsLevel1::buffer_register_ops : &StatsLevel1::buffer_deregister_ops, ok);
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    GpuStats* const gpu = all.started ? gpu_stats_of(&all, device) : nullptr;
    if (gpu == nullptr) {
        return;
    }
    if (registered) {
        ++gpu->maps;
        ++(ok ? gpu->maps_ok : gpu->map_errors);
        gpu->registered_bytes += ok ? length_bytes : 0;
    } else if (ok) {
        ++gpu->unmaps;
        gpu->registered_bytes -= std::min<std::uint64_t>(gpu->registered_bytes, length_bytes);
    }
}

void count_operation(OpCounter StatsLevel1::*index, bool ok) {
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    if (all.started) {
        OpCounter& counter = all.counters.detailed.basic.*index;
        ++(ok ? counter.ok : counter.err);
    }
}

void count_submitted(Route route) {
    count_operation(&StatsLevel1::batch_total_submit_ops, true);
    if (route == Route::p2p) {
        count_operation(&StatsLevel1::batch_p2p_submit_ops, true);
    } else if (route == Route::nvfs) {
        count_operation(&StatsLevel1::batch_nvfs_submit_ops, true);
    } else {
        // Through the host by the kernel's asynchronous I/O: the only counter that the real library increments for it.
        count_operation(&StatsLevel1::batch_aio_submit_ops, true);
    }
}

void set_default_level(int level) {
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    if (!all.level_set_by_call && level >= 0 && level <= max_level) {
        all.level = level;
        // A level from the environment or the file starts counting at once, without cuFileStatsStart.
        all.started = level > 0;
    }
}

GDRKIT_CUFILE_ENTRY Error cuFileSetStatsLevel(int level) {
    return entry("cuFileSetStatsLevel", [&] {
        if (level < 0 || level > max_level) {
            throw CufileError{invalid_value};
        }
        Statistics& all = statistics();
        std::lock_guard lock(all.mutex);
        all.level = level;
        all.level_set_by_call = true;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsLevel(int* level) {
    return entry("cuFileGetStatsLevel", [&] {
        if (level == nullptr) {
            throw CufileError{invalid_value};
        }
        Statistics& all = statistics();
        std::lock_guard lock(all.mutex);
        *level = all.level;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileStatsStart() {
    return entry("cuFileStatsStart", [] {
        require_open();
        Statistics& all = statistics();
        std::lock_guard lock(all.mutex);
        if (all.level == 0) {
            throw CufileError{invalid_value};
        }
        all.started = true;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileStatsStop() {
    return entry("cuFileStatsStop", [] {
        require_open();
        Statistics& all = statistics();
        std::lock_guard lock(all.mutex);
        all.started = false;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileStatsReset() {
    return entry("cuFileStatsReset", [] {
        require_open();
        Statistics& all = statistics();
        std::lock_guard lock(all.mutex);
        all.counters = {};
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL1(StatsLevel1* where) {
    return copy_statistics("cuFileGetStatsL1", 1, where, sizeof *where);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL2(StatsLevel2* where) {
    return copy_statistics("cuFileGetStatsL2", 2, where, sizeof *where);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL3(StatsLevel3* where) {
    return copy_statistics("cuFileGetStatsL3", 3, where, sizeof *where);
}

} // namespace gdrkit::twin::cufile
