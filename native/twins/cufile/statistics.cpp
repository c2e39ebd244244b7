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
    bool level_was_set = false;
    bool started = false;
    StatsLevel3 counted{};
};

Statistics& statistics() {
    static auto* const all = new Statistics;
    return *all;
}

constexpr int level_most = 3;
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

// One kind of call of the first level: operations, bytes, time, and what follows from them.
void add(OpCounter* ops, std::uint64_t* bytes, std::uint64_t* bandwidth, std::uint64_t* average_us,
         std::uint64_t* ops_per_s, std::uint64_t* sum_us, const Done& done) {
    if (done.result < 0) {
        ++ops->err;
        return;
    }
    ++ops->ok;
    *bytes += static_cast<std::uint64_t>(done.result);
    *sum_us += static_cast<std::uint64_t>(done.took.count());
    *average_us = *sum_us / ops->ok;
    *bandwidth = per_second(*bytes, *sum_us);
    *ops_per_s = per_second(ops->ok, *sum_us);
}

bool in_batch(const Done& done) {
    return done.call == Call::batch || done.call == Call::vector;
}

void count_basic(StatsLevel1* basic, const Done& done) {
    if (in_batch(done)) {
        (done.writing ? basic->batch_write_bytes : basic->batch_read_bytes) +=
            static_cast<std::uint64_t>(std::max<ssize_t>(done.result, 0));
    } else if (done.writing) {
        add(&basic->write_ops, &basic->write_bytes, &basic->write_bw, &basic->write_latency_average_us,
            &basic->write_ops_per_s, &basic->write_latency_sum_us, done);
    } else {
        add(&basic->read_ops, &basic->read_bytes, &basic->read_bw, &basic->read_latency_average_us,
            &basic->read_ops_per_s, &basic->read_latency_sum_us, done);
    }
}

std::uint64_t* route_counter(GpuStats* gpu, const Done& done) {
    switch (done.route) {
    case Route::p2p:
        return done.writing ? &gpu->p2p_writes : &gpu->p2p_reads;
    case Route::nvfs:
        return done.writing ? &gpu->nvfs_writes : &gpu->nvfs_reads;
    case Route::posix:
        break;
    }
    return done.writing ? &gpu->posix_writes : &gpu->posix_reads;
}

void count_on_gpu(GpuStats* gpu, const Done& done) {
    ++(done.writing ? gpu->total_writes : gpu->total_reads);
    if (done.result < 0) {
        ++(done.writing ? gpu->write_errors : gpu->read_errors);
        return;
    }
    const auto took_us = static_cast<std::uint64_t>(done.took.count());
    (done.writing ? gpu->write_bytes : gpu->read_bytes) += static_cast<std::uint64_t>(done.result);
    (done.writing ? gpu->write_duration_us : gpu->read_duration_us) += took_us;
    gpu->read_bw = per_second(gpu->read_bytes, gpu->read_duration_us);
    gpu->write_bw = per_second(gpu->write_bytes, gpu->write_duration_us);
    ++*route_counter(gpu, done);
    if (done.unaligned) {
        ++(done.writing ? gpu->unaligned_writes : gpu->unaligned_reads);
    }
}

// The per-GPU counters of a device, with the lock held; none for the host, or for a device beyond the table.
GpuStats* gpu_of(Statistics* all, int device) {
    return device < 0 || device >= gpus_most ? nullptr : &all->counted.gpus[device];
}

// Copies the first `size` bytes of the third level, which begins with the second and the first.
Error give(std::string_view symbol, int level, void* where, std::size_t size) {
    return entry(symbol, [&] {
        require_open();
        Statistics& all = statistics();
        const auto uuids = device_uuids();
        std::lock_guard lock(all.mutex);
        if (where == nullptr || all.level < level) {
            throw Refused{invalid_value};
        }
        all.counted.gpu_count = static_cast<std::uint32_t>(std::min<std::size_t>(uuids.size(), gpus_most));
        for (std::uint32_t gpu = 0; gpu < all.counted.gpu_count; ++gpu) {
            std::memcpy(all.counted.gpus[gpu].uuid, uuids[gpu].data(), uuids[gpu].size());
        }
        std::memcpy(where, &all.counted, size);
    });
}

} // namespace

void count(const Done& done) {
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    if (!all.started) {
        return;
    }
    count_basic(&all.counted.detailed.basic, done);
    if (done.result >= 0) {
        auto& histogram = done.writing ? all.counted.detailed.write_size_kb : all.counted.detailed.read_size_kb;
        ++histogram[bin_of(static_cast<std::size_t>(done.result))];
    }
    // Of transfers of batches, and of vectors, which are batches within, no GPU is told (seen with 1.15 and 1.20).
    if (GpuStats* const gpu = in_batch(done) ? nullptr : gpu_of(&all, done.device)) {
        count_on_gpu(gpu, done);
    }
}

void count_vectors(const Done& done) {
    count_operation(&StatsLevel1::batch_complete_ops, done.result >= 0);
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    if (!all.started) {
        return;
    }
    StatsLevel1& basic = all.counted.detailed.basic;
    if (done.writing) {
        add(&basic.writev_ops, &basic.writev_bytes, &basic.writev_bw, &basic.writev_latency_average_us,
            &basic.writev_ops_per_s, &basic.writev_latency_sum_us, done);
    } else {
        add(&basic.readv_ops, &basic.readv_bytes, &basic.readv_bw, &basic.readv_latency_average_us,
            &basic.readv_ops_per_s, &basic.readv_latency_sum_us, done);
    }
}

void count_registration(int device, std::size_t length_bytes, bool registered, bool ok) {
    count_operation(registered ? &StatsLevel1::buffer_register_ops : &StatsLevel1::buffer_deregister_ops, ok);
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    GpuStats* const gpu = all.started ? gpu_of(&all, device) : nullptr;
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

void count_operation(OpCounter StatsLevel1::*which, bool ok) {
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    if (all.started) {
        OpCounter& counter = all.counted.detailed.basic.*which;
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
        // Through the host, by the kernel's asynchronous I/O; that is all that the real one says of it.
        count_operation(&StatsLevel1::batch_aio_submit_ops, true);
    }
}

void use_level(int level) {
    Statistics& all = statistics();
    std::lock_guard lock(all.mutex);
    if (!all.level_was_set && level >= 0 && level <= level_most) {
        all.level = level;
        // A level from outside counts from the beginning; nobody has to start it.
        all.started = level > 0;
    }
}

GDRKIT_CUFILE_ENTRY Error cuFileSetStatsLevel(int level) {
    return entry("cuFileSetStatsLevel", [&] {
        if (level < 0 || level > level_most) {
            throw Refused{invalid_value};
        }
        Statistics& all = statistics();
        std::lock_guard lock(all.mutex);
        all.level = level;
        all.level_was_set = true;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsLevel(int* level) {
    return entry("cuFileGetStatsLevel", [&] {
        if (level == nullptr) {
            throw Refused{invalid_value};
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
            throw Refused{invalid_value};
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
        all.counted = {};
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL1(StatsLevel1* where) {
    return give("cuFileGetStatsL1", 1, where, sizeof *where);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL2(StatsLevel2* where) {
    return give("cuFileGetStatsL2", 2, where, sizeof *where);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetStatsL3(StatsLevel3* where) {
    return give("cuFileGetStatsL3", 3, where, sizeof *where);
}

} // namespace gdrkit::twin::cufile
