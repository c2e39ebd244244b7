// Coalesced copies to a device: workers claim slices, submit a filled copy, and release its buffer.
#include "engine/coalesced_copy.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace gdrkit::engine {

CoalescedCopy::CoalescedCopy(Chunk&& chunk, std::size_t buffer_index, std::byte* buffer, std::uint64_t slice_bytes)
    : chunk_(std::move(chunk)), buffer_index_(buffer_index), buffer_(buffer), slice_bytes_(slice_bytes),
      slice_results_((chunk_.bytes + slice_bytes - 1) / slice_bytes), unfilled_slices_count_(slice_results_.size()) {}

bool CoalescedCopy::claim(const std::shared_ptr<CoalescedCopy>& copy, Chunk& chunk) {
    const std::size_t slice_index = copy->claimed_slices_count_.fetch_add(1, std::memory_order_relaxed);
    if (slice_index >= copy->slice_count()) {
        return false;
    }
    chunk.coalesced_copy = copy;
    chunk.slice_index = slice_index;
    return true;
}

CoalescedCopies::CoalescedCopies(PrimaryContexts& contexts, Staging& staging, std::byte* slab, const Tuning& tuning)
    : contexts_(contexts), staging_(staging), slab_(slab), tuning_(tuning), free_buffers_(tuning.coalesced_count) {
    std::iota(free_buffers_.begin(), free_buffers_.end(), std::size_t{0});
}

CopyStream& CoalescedCopies::activate_stream(int device) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<CopyStream>& stream = streams_[device];
    if (!stream) {
        const cuda::Context context = contexts_.get(device);
        cuda::check("cuCtxSetCurrent", cuda::driver().context_set(context));
        staging_.pin();
        stream = std::make_unique<CopyStream>(context, tuning_.coalesced_count, tuning_.polls_device);
    }
    stream->make_current();
    return *stream;
}

const CopyStream& CoalescedCopies::submitted_stream(int device) {
    const std::lock_guard lock(mutex_);
    return *streams_.at(device);
}

std::shared_ptr<CoalescedCopy> CoalescedCopies::open(Chunk& chunk) {
    activate_stream(chunk.job->device());
    const std::size_t buffer_index = take_buffer_index();
    chunk.opens_coalesced_copy = false;
    return std::make_shared<CoalescedCopy>(std::move(chunk), buffer_index,
                                           slab_ + buffer_index * tuning_.coalesced_bytes, tuning_.slice_bytes);
}

std::size_t CoalescedCopies::take_buffer_index() {
    std::unique_lock lock(mutex_);
    for (;;) {
        if (!free_buffers_.empty()) {
            const std::size_t buffer_index = free_buffers_.back();
            free_buffers_.pop_back();
            return buffer_index;
        }
        if (submitted_copies_.empty()) {
            buffers_changed_.wait(lock); // Every buffer is being filled or completed by another worker.
            continue;
        }
        lock.unlock();
        complete_oldest(true);
        lock.lock();
    }
}

void CoalescedCopies::fill(const Chunk& chunk) {
    CoalescedCopy& copy = *chunk.coalesced_copy;
    const Part& part = copy.part();
    const std::uint64_t slice_begin = chunk.slice_index * copy.slice_bytes_;
    const std::uint64_t slice_length = std::min(copy.slice_bytes_, part.length - slice_begin);
    Job& job = *copy.chunk_.job;
    IoResult& result = copy.slice_results_[chunk.slice_index];
    try {
        result = read_buffered(job.file(part), job.extent(part).offset + part.extent_offset + slice_begin, slice_length,
                               copy.buffer_ + slice_begin);
    } catch (const Error& error) {
        result.failure = error.failure();
    }
    if (copy.unfilled_slices_count_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        submit(chunk.coalesced_copy);
    }
}

void CoalescedCopies::submit(const std::shared_ptr<CoalescedCopy>& copy) {
    Part& part = copy->part();
    Job& job = *copy->chunk_.job;
    std::uint64_t expected_bytes = 0; // Bytes up to the end of the slice if no slice is short.
    for (const IoResult& result : copy->slice_results_) {
        part.done_bytes += result.bytes;
        expected_bytes = std::min(expected_bytes + copy->slice_bytes_, part.length);
        if (result.failure) {
            job.fail(part.extent_index, *result.failure);
        }
        if (part.done_bytes < expected_bytes) {
            break; // The bytes after a short slice are not copied.
        }
    }
    CopyStream* stream = nullptr;
    try {
        stream = &activate_stream(job.device());
        if (part.done_bytes != 0) {
            stream->copy_to_device(job.extent(part).address + part.extent_offset, copy->buffer_, part.done_bytes);
        }
        stream->record_event(copy->buffer_index_);
    } catch (const Error& error) {
        job.fail(part.extent_index, error.failure());
        part.done_bytes = 0;
        if (stream != nullptr) {
            stream->drain();
        }
        release(*copy);
        return;
    }
    const std::lock_guard lock(mutex_);
    submitted_copies_.push_back(copy);
    submitted_count_.fetch_add(1, std::memory_order_relaxed);
    buffers_changed_.notify_one();
}

bool CoalescedCopies::complete_oldest(bool is_blocking) {
    if (!is_any_submitted()) {
        return false;
    }
    std::shared_ptr<CoalescedCopy> copy;
    std::optional<Failure> query_failure;
    {
        const std::lock_guard lock(mutex_);
        if (submitted_copies_.empty()) {
            return false;
        }
        const CoalescedCopy& oldest_copy = *submitted_copies_.front();
        if (!is_blocking) {
            try {
                const CopyStream& stream = *streams_.at(oldest_copy.chunk_.job->device());
                stream.make_current();
                if (!stream.is_done(oldest_copy.buffer_index_)) {
                    return false;
                }
            } catch (const Error& error) {
                query_failure = error.failure();
            }
        }
        copy = std::move(submitted_copies_.front());
        submitted_copies_.pop_front();
        submitted_count_.fetch_sub(1, std::memory_order_relaxed);
    }
    finish(*copy, query_failure);
    return true;
}

void CoalescedCopies::close() {
    const std::lock_guard lock(mutex_);
    streams_.clear();
}

void CoalescedCopies::finish(CoalescedCopy& copy, const std::optional<Failure>& query_failure) {
    Part& part = copy.part();
    Job& job = *copy.chunk_.job;
    const CopyStream& stream = submitted_stream(job.device());
    try {
        if (query_failure) {
            throw Error(*query_failure);
        }
        stream.make_current();
        stream.wait(copy.buffer_index_);
    } catch (const Error& error) {
        job.fail(part.extent_index, error.failure());
        part.done_bytes = 0;
        // The copy may still run although the call failed. It must end before another worker fills the buffer.
        stream.drain();
    }
    release(copy);
}

void CoalescedCopies::release(CoalescedCopy& copy) {
    // Free the buffer before the job completes, because then the caller may start the next job, which needs a buffer.
    {
        const std::lock_guard lock(mutex_);
        free_buffers_.push_back(copy.buffer_index_);
        buffers_changed_.notify_one();
    }
    constexpr std::uint64_t direct_bytes = 0; // The slices were read through the page cache.
    copy.chunk_.job->complete(copy.chunk_, direct_bytes);
}

} // namespace gdrkit::engine
