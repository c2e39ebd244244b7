#include "engine/haul.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace gdrkit::engine {

Haul::Haul(Piece&& piece, std::size_t slot, std::byte* at, std::uint64_t load_bytes)
    : piece_(std::move(piece)), slot_(slot), at_(at), load_bytes_(load_bytes),
      moved_((piece_.bytes + load_bytes - 1) / load_bytes), missing_(moved_.size()) {}

bool Haul::claim(const std::shared_ptr<Haul>& haul, Piece& piece) {
    const std::size_t load = haul->claimed_.fetch_add(1, std::memory_order_relaxed);
    if (load >= haul->loads_count()) {
        return false;
    }
    piece.haul = haul;
    piece.load = load;
    return true;
}

Hauls::Hauls(Contexts& contexts, Staging& staging, std::byte* slab, const Tuning& tuning)
    : contexts_(contexts), staging_(staging), slab_(slab), tuning_(tuning), free_(tuning.hauls_count) {
    std::iota(free_.begin(), free_.end(), std::size_t{0});
}

Lane& Hauls::lane_of(int device) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Lane>& lane = lanes_[device];
    if (!lane) {
        const cuda::Context context = contexts_.of(device);
        cuda::check("cuCtxSetCurrent", cuda::driver().context_set(context));
        staging_.pin();
        lane = std::make_unique<Lane>(context, tuning_.hauls_count, tuning_.sleeps_until_asked);
    }
    lane->make_current();
    return *lane;
}

const Lane& Hauls::lane_that_sent(int device) {
    const std::lock_guard lock(mutex_);
    return *lanes_.at(device);
}

std::shared_ptr<Haul> Hauls::open(Piece& piece) {
    lane_of(piece.job->device());
    const std::size_t slot = free_slot();
    piece.hauled = false;
    return std::make_shared<Haul>(std::move(piece), slot, slab_ + slot * tuning_.haul_bytes, tuning_.load_bytes);
}

std::size_t Hauls::free_slot() {
    std::unique_lock lock(mutex_);
    for (;;) {
        if (!free_.empty()) {
            const std::size_t slot = free_.back();
            free_.pop_back();
            return slot;
        }
        if (copied_.empty()) {
            changed_.wait(lock); // Other workers still fill all of them, or wait for the copies.
            continue;
        }
        lock.unlock();
        retire(true);
        lock.lock();
    }
}

void Hauls::load(const Piece& piece) {
    Haul& haul = *piece.haul;
    const Part& part = haul.part();
    const std::uint64_t at = piece.load * haul.load_bytes_;
    const std::uint64_t length = std::min(haul.load_bytes_, part.length - at);
    Job& job = *haul.piece_.job;
    Moved& moved = haul.moved_[piece.load];
    try {
        moved = read_buffered(job.file(part), job.extent(part).offset + part.at + at, length, haul.at_ + at);
    } catch (const Error& error) {
        moved.failure = error.failure();
    }
    if (haul.missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        send(piece.haul);
    }
}

void Hauls::send(const std::shared_ptr<Haul>& haul) {
    Part& part = haul->part();
    Job& job = *haul->piece_.job;
    std::uint64_t wanted = 0;
    for (const Moved& each : haul->moved_) {
        part.done += each.bytes;
        wanted = std::min(wanted + haul->load_bytes_, part.length);
        if (each.failure) {
            job.fail(part.extent, *each.failure);
        }
        if (part.done < wanted) {
            break; // Bytes behind a gap do not count.
        }
    }
    Lane* lane = nullptr;
    try {
        lane = &lane_of(job.device());
        if (part.done != 0) {
            lane->to_device(job.extent(part).address + part.at, haul->at_, part.done);
        }
        lane->mark(haul->slot_);
    } catch (const Error& error) {
        job.fail(part.extent, error.failure());
        part.done = 0;
        if (lane != nullptr) {
            lane->drain();
        }
        free(*haul);
        return;
    }
    const std::lock_guard lock(mutex_);
    copied_.push_back(haul);
    copied_count_.fetch_add(1, std::memory_order_relaxed);
    changed_.notify_one();
}

bool Hauls::retire(bool waits) {
    if (!is_any_copied()) {
        return false;
    }
    std::shared_ptr<Haul> haul;
    std::optional<Failure> refused;
    {
        const std::lock_guard lock(mutex_);
        if (copied_.empty()) {
            return false;
        }
        const Haul& oldest = *copied_.front();
        if (!waits) {
            try {
                const Lane& lane = *lanes_.at(oldest.piece_.job->device());
                lane.make_current();
                if (!lane.is_done(oldest.slot_)) {
                    return false;
                }
            } catch (const Error& error) {
                refused = error.failure();
            }
        }
        haul = std::move(copied_.front());
        copied_.pop_front();
        copied_count_.fetch_sub(1, std::memory_order_relaxed);
    }
    settle(*haul, refused);
    return true;
}

void Hauls::close() {
    const std::lock_guard lock(mutex_);
    lanes_.clear();
}

void Hauls::settle(Haul& haul, const std::optional<Failure>& refused) {
    Part& part = haul.part();
    Job& job = *haul.piece_.job;
    const Lane& lane = lane_that_sent(job.device());
    try {
        if (refused) {
            throw Error(*refused);
        }
        lane.make_current();
        lane.wait(haul.slot_);
    } catch (const Error& error) {
        job.fail(part.extent, error.failure());
        part.done = 0;
        // The copy may still run although the query failed. It must not read memory that others fill.
        lane.drain();
    }
    free(haul);
}

void Hauls::free(Haul& haul) {
    // The buffer is freed first, because the waiter of the job may continue at once.
    {
        const std::lock_guard lock(mutex_);
        free_.push_back(haul.slot_);
        changed_.notify_one();
    }
    haul.piece_.job->settle(haul.piece_, 0);
}

} // namespace gdrkit::engine
