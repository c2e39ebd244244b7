// The thread of a worker: takes chunks, moves their bytes through the buffers of its slab, and reports their end.
#include "engine/worker.hpp"

#include <algorithm>
#include <cstring>

namespace gdrkit::engine {
namespace {

std::uint64_t buffer_bytes_of(const Tuning& tuning) {
    return tuning.chunk_bytes + slack_bytes;
}

std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
    return (value + alignment - 1) & ~(alignment - 1);
}

// Joins parts that are contiguous both in the device memory and in the staging memory, and calls copy(address, staging
// offset, length) once for each joined range. A range ends at the end of its device allocation, because the driver
// refuses a copy to two allocations, even if one follows the other directly. `length_of` returns how many bytes of a
// part to copy.
template <typename LengthOf, typename Copy>
void for_each_device_copy(const Chunk& chunk, const CopyStream& stream, const LengthOf& length_of, const Copy& copy) {
    std::uint64_t range_address = 0;
    std::uint64_t range_staging_offset = 0;
    std::uint64_t range_bytes = 0;
    // End of the device allocation of the current range. It is queried only if parts are contiguous.
    std::uint64_t allocation_end = 0;
    for (const Part& part : chunk.parts) {
        const std::uint64_t part_address = chunk.job->extent(part).address + part.extent_offset;
        const std::uint64_t part_bytes = length_of(part);
        if (range_bytes != 0 && part_address == range_address + range_bytes &&
            part.staging_offset == range_staging_offset + range_bytes) {
            if (range_address >= allocation_end) {
                allocation_end = stream.find_allocation_end(range_address);
            }
            if (part_address + part_bytes <= allocation_end) {
                range_bytes += part_bytes;
                continue;
            }
        }
        if (range_bytes != 0) {
            copy(range_address, range_staging_offset, range_bytes);
        }
        // The known end may belong to an allocation behind the new range.
        allocation_end = part_address < range_address ? 0 : allocation_end;
        range_address = part_address;
        range_staging_offset = part.staging_offset;
        range_bytes = part_bytes;
    }
    if (range_bytes != 0) {
        copy(range_address, range_staging_offset, range_bytes);
    }
}

} // namespace

std::size_t slab_bytes_of(const Tuning& tuning) {
    const std::uint64_t direct_bytes = std::max(tuning.direct_read_bytes, tuning.direct_write_bytes);
    return std::max(tuning.buffers_count * buffer_bytes_of(tuning), direct_bytes + slack_bytes);
}

Worker::Worker(Dispatcher& dispatcher, PrimaryContexts& contexts, Staging& staging, CoalescedCopies& coalesced_copies,
               std::byte* slab, const Tuning& tuning)
    : dispatcher_(dispatcher), contexts_(contexts), staging_(staging), coalesced_copies_(coalesced_copies), slab_(slab),
      tuning_(tuning), buffers_(tuning.buffers_count) {}

void Worker::run() {
    Chunk chunk;
    for (;;) {
        // A worker whose buffers are all pending completes the oldest buffer before it takes work. Meanwhile, workers
        // with a free buffer can take the work.
        if (buffers_[next_buffer_index_].is_pending) {
            complete_oldest();
        }
        // Every worker completes coalesced copies, because the worker that submitted a copy may be busy for a long
        // time.
        if (coalesced_copies_.is_any_submitted()) {
            current_stream_ = nullptr;
            while (coalesced_copies_.complete_oldest(false)) {
            }
        }
        const TakeResult take_result = take(chunk);
        if (take_result == TakeResult::chunk && chunk.coalesced_copy) {
            coalesced_copies_.fill(chunk);
            chunk.coalesced_copy.reset();
            current_stream_ = nullptr;
        } else if (take_result == TakeResult::chunk && chunk.opens_coalesced_copy) {
            open_coalesced(chunk);
        } else if (take_result == TakeResult::chunk) {
            // A chunk that fills the slab uses the memory of all buffers, so no other chunk may be pending.
            const Buffer& newest_buffer = buffers_[(next_buffer_index_ + buffers_.size() - 1) % buffers_.size()];
            while (pending_buffers_count_ != 0 && (fills_slab(chunk) || fills_slab(newest_buffer.chunk))) {
                complete_oldest();
            }
            start_chunk(next_buffer_index_, chunk);
        } else if (!complete_oldest() && !complete_coalesced() && take_result == TakeResult::nothing) {
            return;
        }
    }
}

// Takes the next work. A worker that has just read from a disk has kept its reservation until now, so it can take the
// next chunk of the same job if there is one. Otherwise it wakes another worker. So the same few threads do all reads,
// and no read waits until a thread wakes up. If all threads took turns, their staging memory would not fit into the
// processor caches.
TakeResult Worker::take(Chunk& chunk) {
    if (reserved_job_) {
        const std::shared_ptr<Job> job = std::move(reserved_job_);
        reserved_job_.reset();
        job->release_reservation();
        const TakeResult take_result = dispatcher_.take_work(chunk, false);
        if (take_result == TakeResult::chunk && !chunk.coalesced_copy && chunk.holds_reservation && chunk.job == job) {
            return take_result;
        }
        dispatcher_.wake_another_worker();
        if (take_result != TakeResult::busy || !is_idle()) {
            return take_result;
        }
    }
    return dispatcher_.take_work(chunk, is_idle());
}

// Returns whether this worker has nothing to complete, so that it may sleep until there is new work.
bool Worker::is_idle() const noexcept {
    return pending_buffers_count_ == 0 &&
           (coalesced_copies_.is_copy_opening() || !coalesced_copies_.is_any_submitted());
}

void Worker::open_coalesced(Chunk& chunk) {
    std::shared_ptr<CoalescedCopy> copy;
    try {
        copy = coalesced_copies_.open(chunk);
    } catch (const Error& error) {
        fail_chunk(chunk, error.failure());
    }
    current_stream_ = nullptr;
    dispatcher_.publish(std::move(copy));
}

// Waits for the oldest coalesced copy and completes it. Does nothing while another worker opens a coalesced copy: if
// that worker needs a buffer, it completes the oldest copy itself.
bool Worker::complete_coalesced() {
    current_stream_ = nullptr;
    return !coalesced_copies_.is_copy_opening() && coalesced_copies_.complete_oldest(true);
}

CopyStream& Worker::activate_stream(int device) {
    std::unique_ptr<CopyStream>& stream = streams_[device];
    if (!stream) {
        const cuda::Context context = contexts_.get(device);
        cuda::check("cuCtxSetCurrent", cuda::driver().context_set(context));
        current_stream_ = nullptr;
        staging_.pin();
        stream = std::make_unique<CopyStream>(context, buffers_.size(), tuning_.polls_device);
        current_stream_ = stream.get();
    }
    if (current_stream_ != stream.get()) {
        stream->make_current();
        current_stream_ = stream.get();
    }
    return *stream;
}

std::byte* Worker::memory_of(std::size_t buffer_index, const Chunk& chunk) const {
    return fills_slab(chunk) ? slab_ : slab_ + buffer_index * buffer_bytes_of(tuning_);
}

// Returns the number of parts from `first_index` on that follow each other in one file, and their size. One read or
// write moves all of them, because they also follow each other in the staging memory.
Worker::FileRun Worker::find_run_at(const Chunk& chunk, std::size_t first_index) {
    FileRun run{.parts_count = 0, .length = 0};
    const Extent& first_extent = chunk.job->extent(chunk.parts[first_index]);
    const std::uint64_t run_offset = first_extent.offset + chunk.parts[first_index].extent_offset;
    for (std::size_t index = first_index; index < chunk.parts.size(); ++index) {
        const Part& part = chunk.parts[index];
        const Extent& extent = chunk.job->extent(part);
        if (extent.file_index != first_extent.file_index ||
            extent.offset + part.extent_offset != run_offset + run.length) {
            break;
        }
        ++run.parts_count;
        run.length += part.length;
    }
    return run;
}

// Divides the bytes that one read or write has moved among the parts of its run. Reports a failure for the first part
// that is not complete. Returns false if the run failed.
bool Worker::distribute_result(Chunk& chunk, std::size_t first_index, const FileRun& run, const IoResult& result) {
    std::uint64_t bytes_left = result.bytes;
    bool is_failure_reported = !result.failure;
    for (std::size_t index = first_index; index < first_index + run.parts_count; ++index) {
        Part& part = chunk.parts[index];
        part.done_bytes = std::min(bytes_left, part.length);
        bytes_left -= part.done_bytes;
        if (!is_failure_reported && (part.done_bytes < part.length || index + 1 == first_index + run.parts_count)) {
            chunk.job->fail(part.extent_index, *result.failure);
            is_failure_reported = true;
        }
    }
    return !result.failure;
}

// Returns whether the I/O of a run should bypass the page cache. The run begins with `part` and has `length` bytes.
bool Worker::wants_direct(const Chunk& chunk, const Part& part, std::uint64_t length) {
    const Extent& extent = chunk.job->extent(part);
    const Access access = chunk.job->access();
    if (chunk.is_direct || access == Access::buffered) {
        return chunk.is_direct;
    }
    // For the chunks of a long extent, Job::take has decided, and set chunk.is_direct. Only parts that are complete
    // short extents are decided here.
    if (part.length != extent.length) {
        return false;
    }
    File& file = chunk.job->file(part);
    const bool is_read = chunk.job->direction() == Direction::read;
    if (access == Access::direct && is_read) {
        return file.direct_fd() >= 0;
    }
    if (chunk.bytes < tuning_.direct_min_bytes || length < tuning_.direct_min_bytes) {
        return false;
    }
    if (access == Access::direct) {
        return file.direct_fd() >= 0;
    }
    if (!is_read) {
        return false;
    }
    const Residency residency = file.residency_of(extent.offset, length);
    return residency.cached_pages_count * 2 < residency.pages_count && file.direct_fd() >= 0;
}

// Decides for each part whether its I/O uses O_DIRECT, and sets its position in the staging memory. Throws Error if a
// file cannot be opened.
void Worker::assign_staging_offsets(Chunk& chunk) {
    std::uint64_t staging_offset = 0;
    std::uint64_t slack_left_bytes = slack_bytes;
    for (std::size_t first_index = 0; first_index < chunk.parts.size();) {
        const FileRun run = find_run_at(chunk, first_index);
        const Part& first_part = chunk.parts[first_index];
        const File& file = chunk.job->file(first_part);
        const bool may_be_direct =
            2 * file.alignment_bytes() <= slack_left_bytes && wants_direct(chunk, first_part, run.length);
        // wants_direct() may have opened the file with O_DIRECT, which sets its real alignment.
        const std::uint64_t alignment = file.alignment_bytes();
        const bool is_direct = may_be_direct && 2 * alignment <= slack_left_bytes;
        if (is_direct) {
            slack_left_bytes -= 2 * alignment;
            staging_offset = align_up(staging_offset, alignment) +
                             get_offset_in_block(file, chunk.job->extent(first_part).offset + first_part.extent_offset);
        }
        for (std::size_t index = first_index; index < first_index + run.parts_count; ++index) {
            chunk.parts[index].is_direct = is_direct;
            chunk.parts[index].staging_offset = staging_offset;
            staging_offset += chunk.parts[index].length;
        }
        first_index += run.parts_count;
    }
}

IoResult Worker::read_run(const Chunk& chunk, const Part& part, std::uint64_t length, std::byte* base) {
    File& file = chunk.job->file(part);
    const std::uint64_t offset = chunk.job->extent(part).offset + part.extent_offset;
    std::byte* const to = base + part.staging_offset;
    return part.is_direct ? read_direct(file, offset, length, to - get_offset_in_block(file, offset))
                          : read_buffered(file, offset, length, to);
}

IoResult Worker::write_run(const Chunk& chunk, const Part& part, std::uint64_t length, const std::byte* base) {
    File& file = chunk.job->file(part);
    const std::uint64_t offset = chunk.job->extent(part).offset + part.extent_offset;
    const std::byte* const from = base + part.staging_offset;
    return part.is_direct ? write_direct(file, offset, length, from - get_offset_in_block(file, offset))
                          : write_buffered(file, offset, length, from);
}

void Worker::start_chunk(std::size_t buffer_index, Chunk& chunk) {
    if (chunk.job->device() == host_memory) {
        move_host_chunk(chunk);
        return;
    }
    Buffer& buffer = buffers_[buffer_index];
    std::swap(buffer.chunk, chunk);
    chunk.job.reset();
    buffer.direct_bytes = 0;
    try {
        CopyStream& stream = activate_stream(buffer.chunk.job->device());
        buffer.stream = &stream;
        assign_staging_offsets(buffer.chunk);
        if (buffer.chunk.job->direction() == Direction::read) {
            start_read(buffer_index, stream);
        } else {
            start_write(buffer_index, stream);
        }
        stream.record_event(buffer_index);
    } catch (const Error& error) {
        buffer.chunk.job->fail(buffer.chunk.parts.front().extent_index, error.failure());
        // The copies on the device must be over before the memory is used again.
        if (buffer.stream != nullptr) {
            buffer.stream->drain();
        }
        fail_chunk(buffer.chunk, error.failure());
        return;
    }
    buffer.is_pending = true;
    ++pending_buffers_count_;
    next_buffer_index_ = (buffer_index + 1) % buffers_.size();
}

void Worker::start_read(std::size_t buffer_index, CopyStream& stream) {
    Buffer& buffer = buffers_[buffer_index];
    Chunk& chunk = buffer.chunk;
    std::byte* const base = memory_of(buffer_index, chunk);
    for (std::size_t first_index = 0; first_index < chunk.parts.size();) {
        const FileRun run = find_run_at(chunk, first_index);
        IoResult result;
        try {
            result = read_run(chunk, chunk.parts[first_index], run.length, base);
        } catch (const Error& error) {
            result.failure = error.failure();
        }
        buffer.direct_bytes += result.used_direct ? result.bytes : 0;
        if (!distribute_result(chunk, first_index, run, result)) {
            break;
        }
        first_index += run.parts_count;
    }
    if (chunk.holds_reservation) {
        reserved_job_ = chunk.job;
        chunk.holds_reservation = false;
    }
    for_each_device_copy(
        chunk, stream, [](const Part& part) { return part.done_bytes; },
        [&](std::uint64_t address, std::uint64_t staging_offset, std::uint64_t bytes) {
            stream.copy_to_device(address, base + staging_offset, bytes);
        });
}

void Worker::start_write(std::size_t buffer_index, CopyStream& stream) {
    const Chunk& chunk = buffers_[buffer_index].chunk;
    std::byte* const base = memory_of(buffer_index, chunk);
    for_each_device_copy(
        chunk, stream, [](const Part& part) { return part.length; },
        [&](std::uint64_t address, std::uint64_t staging_offset, std::uint64_t bytes) {
            stream.copy_to_host(base + staging_offset, address, bytes);
        });
}

bool Worker::complete_oldest() {
    if (pending_buffers_count_ == 0) {
        return false;
    }
    const std::size_t buffers_count = buffers_.size();
    complete_buffer((next_buffer_index_ + buffers_count - pending_buffers_count_) % buffers_count);
    return true;
}

void Worker::complete_buffer(std::size_t buffer_index) {
    Buffer& buffer = buffers_[buffer_index];
    Chunk& chunk = buffer.chunk;
    buffer.is_pending = false;
    --pending_buffers_count_;
    try {
        if (current_stream_ != buffer.stream) {
            buffer.stream->make_current();
            current_stream_ = buffer.stream;
        }
        buffer.stream->wait(buffer_index);
    } catch (const Error& error) {
        // The copy may still run although the wait failed. It must not write to memory that its owner frees.
        buffer.stream->drain();
        fail_chunk(chunk, error.failure());
        return;
    }
    if (chunk.job->direction() == Direction::write) {
        buffer.direct_bytes = write_parts(chunk, memory_of(buffer_index, chunk));
    }
    complete_chunk(chunk, buffer.direct_bytes);
}

std::uint64_t Worker::write_parts(Chunk& chunk, const std::byte* base) {
    std::uint64_t direct_bytes = 0;
    for (std::size_t first_index = 0; first_index < chunk.parts.size();) {
        const FileRun run = find_run_at(chunk, first_index);
        IoResult result;
        try {
            result = write_run(chunk, chunk.parts[first_index], run.length, base);
        } catch (const Error& error) {
            result.failure = error.failure();
        }
        direct_bytes += result.used_direct ? result.bytes : 0;
        if (!distribute_result(chunk, first_index, run, result)) {
            break;
        }
        first_index += run.parts_count;
    }
    release_reservation(chunk);
    return direct_bytes;
}

// Moves a chunk of a job in host memory. The memory is read and written in place, and staged only for O_DIRECT with an
// unaligned offset, length or address.
void Worker::move_host_chunk(Chunk& chunk) {
    std::uint64_t direct_bytes = 0;
    const bool is_read = chunk.job->direction() == Direction::read;
    for (Part& part : chunk.parts) {
        IoResult result;
        try {
            File& file = chunk.job->file(part);
            const Extent& extent = chunk.job->extent(part);
            const std::uint64_t offset = extent.offset + part.extent_offset;
            auto* const memory = reinterpret_cast<std::byte*>(extent.address + part.extent_offset);
            part.is_direct = wants_direct(chunk, part, part.length);
            // A low bit is set if the offset, the length or the address is not aligned.
            const std::uint64_t alignment_bits = offset | part.length | reinterpret_cast<std::uintptr_t>(memory);
            bool is_staged = part.is_direct && (alignment_bits & (file.alignment_bytes() - 1)) != 0;
            if (is_staged && 2 * file.alignment_bytes() > slack_bytes) {
                // The partial blocks would overlap the next worker's staging memory. The page cache needs no alignment.
                is_staged = part.is_direct = false;
            }
            std::byte* const base = is_staged ? slab_ : memory;
            part.staging_offset = is_staged ? get_offset_in_block(file, offset) : 0;
            if (is_staged && !is_read) {
                std::memcpy(base + part.staging_offset, memory, part.length);
            }
            result = is_read ? read_run(chunk, part, part.length, base) : write_run(chunk, part, part.length, base);
            if (is_staged && is_read) {
                std::memcpy(memory, base + part.staging_offset, result.bytes);
            }
        } catch (const Error& error) {
            result.failure = error.failure();
        }
        part.done_bytes = result.bytes;
        direct_bytes += result.used_direct ? result.bytes : 0;
        if (result.failure) {
            chunk.job->fail(part.extent_index, *result.failure);
            break;
        }
    }
    complete_chunk(chunk, direct_bytes);
}

void Worker::release_reservation(Chunk& chunk) {
    if (chunk.holds_reservation) {
        chunk.job->release_reservation(chunk);
        dispatcher_.wake_another_worker();
    }
}

// Reports the failure and completes the chunk as if none of its bytes had arrived.
void Worker::fail_chunk(Chunk& chunk, const Failure& failure) {
    chunk.job->fail(chunk.parts.front().extent_index, failure);
    for (Part& part : chunk.parts) {
        part.done_bytes = 0;
    }
    complete_chunk(chunk, 0);
}

void Worker::complete_chunk(Chunk& chunk, std::uint64_t direct_bytes) {
    release_reservation(chunk);
    chunk.job->complete(chunk, direct_bytes);
    chunk.job.reset();
}

} // namespace gdrkit::engine
