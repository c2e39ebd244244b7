#include "engine/pump.hpp"

#include <algorithm>
#include <cstring>

namespace gdrkit::engine {
namespace {

// Extra space of a buffer, in bytes, for the partial blocks of parts that begin or end inside a block.
constexpr std::uint64_t slack_bytes = 256U << 10U;

std::uint64_t slot_bytes_of(const Tuning& tuning) {
    return tuning.piece_bytes + slack_bytes;
}

std::uint64_t up(std::uint64_t value, std::uint64_t alignment) {
    return (value + alignment - 1) & ~(alignment - 1);
}

// Calls `copy` with (address, offset in staging, length) once for each run of parts that are contiguous in both.
template <typename Length, typename Copy> void runs_of(const Piece& piece, const Length& length, const Copy& copy) {
    std::uint64_t address = 0;
    std::uint64_t where = 0;
    std::uint64_t bytes = 0;
    for (const Part& each : piece.parts) {
        const std::uint64_t begin = piece.job->extent(each).address + each.at;
        const std::uint64_t count = length(each);
        if (bytes != 0 && begin == address + bytes && each.where == where + bytes) {
            bytes += count;
            continue;
        }
        if (bytes != 0) {
            copy(address, where, bytes);
        }
        address = begin;
        where = each.where;
        bytes = count;
    }
    if (bytes != 0) {
        copy(address, where, bytes);
    }
}

} // namespace

std::size_t slab_bytes_of(const Tuning& tuning) {
    const std::uint64_t direct_bytes = std::max(tuning.direct_read_bytes, tuning.direct_write_bytes);
    return std::max(tuning.slots_count * slot_bytes_of(tuning), direct_bytes + slack_bytes);
}

Pump::Pump(Dispatcher& dispatcher, Contexts& contexts, Staging& staging, Hauls& hauls, std::byte* slab,
           const Tuning& tuning)
    : dispatcher_(dispatcher), contexts_(contexts), staging_(staging), hauls_(hauls), slab_(slab), tuning_(tuning),
      slots_(tuning.slots_count) {}

void Pump::run() {
    Piece piece;
    for (;;) {
        // A worker without a free buffer takes nothing, because another worker may have one.
        if (slots_[next_].pending) {
            retire_oldest();
        }
        // Any worker settles completed copies, because the one that submitted them may be busy for long.
        if (hauls_.is_any_copied()) {
            current_ = nullptr;
            while (hauls_.retire(false)) {
            }
        }
        const Taken taken = take(piece);
        if (taken == Taken::piece && piece.haul) {
            hauls_.load(piece);
            piece.haul.reset();
            current_ = nullptr;
        } else if (taken == Taken::piece && piece.hauled) {
            open_haul(piece);
        } else if (taken == Taken::piece) {
            const Slot& last = slots_[(next_ + slots_.size() - 1) % slots_.size()];
            while (pending_ != 0 && (is_wide(piece) || is_wide(last.piece))) {
                retire_oldest();
            }
            begin(next_, piece);
        } else if (!retire_oldest() && !retire_haul() && taken == Taken::nothing) {
            return;
        }
    }
}

// A worker that just read from disk keeps its place among the readers and takes the next chunk. Other workers are woken
// only if it does not. So only as many threads as may read are active, and none has to wake up first. Otherwise all
// threads and all of the staging memory would take turns.
Taken Pump::take(Piece& piece) {
    if (kept_) {
        const std::shared_ptr<Job> before = std::move(kept_);
        kept_.reset();
        before->release_place();
        const Taken taken = dispatcher_.next(piece, false);
        if (taken == Taken::piece && !piece.haul && piece.limited && piece.job == before) {
            return taken;
        }
        dispatcher_.let_others_go_on();
        if (taken != Taken::busy || !is_free()) {
            return taken;
        }
    }
    return dispatcher_.next(piece, is_free());
}

// Returns whether this worker can do nothing except new work.
bool Pump::is_free() const noexcept {
    return pending_ == 0 && (hauls_.opening() || !hauls_.is_any_copied());
}

void Pump::open_haul(Piece& piece) {
    std::shared_ptr<Haul> haul;
    try {
        haul = hauls_.open(piece);
    } catch (const Error& error) {
        give_up(piece, error.failure());
    }
    current_ = nullptr;
    dispatcher_.share(std::move(haul));
}

// A worker that opens a coalesced copy waits for a buffer itself.
bool Pump::retire_haul() {
    current_ = nullptr;
    return !hauls_.opening() && hauls_.retire(true);
}

Lane& Pump::lane_of(int device) {
    std::unique_ptr<Lane>& lane = lanes_[device];
    if (!lane) {
        const cuda::Context context = contexts_.of(device);
        cuda::check("cuCtxSetCurrent", cuda::driver().context_set(context));
        current_ = nullptr;
        staging_.pin();
        lane = std::make_unique<Lane>(context, slots_.size(), tuning_.sleeps_until_asked);
        current_ = lane.get();
    }
    if (current_ != lane.get()) {
        lane->make_current();
        current_ = lane.get();
    }
    return *lane;
}

std::byte* Pump::base_of(std::size_t index, const Piece& piece) const {
    return is_wide(piece) ? slab_ : slab_ + index * slot_bytes_of(tuning_);
}

bool Pump::wants_direct(const Piece& piece, const Part& part) {
    const Extent& extent = piece.job->extent(part);
    const Access access = piece.job->access();
    if (piece.direct || access == Access::buffered || piece.bytes < tuning_.direct_least_bytes) {
        return piece.direct;
    }
    // Only whole extents are left here. For larger ones, this was decided when the piece was taken.
    if (part.length != extent.length || part.length < tuning_.direct_least_bytes) {
        return false;
    }
    File& file = piece.job->file(part);
    if (access == Access::direct) {
        return file.direct() >= 0;
    }
    if (piece.job->direction() == Direction::write) {
        return false;
    }
    const Residency found = file.residency_of(extent.offset, part.length);
    return found.cached_pages * 2 < found.pages && file.direct() >= 0;
}

// Sets the position of each part in the staging memory. Throws Error if a file cannot be opened.
void Pump::lay_out(Piece& piece) {
    std::uint64_t where = 0;
    std::uint64_t slack = slack_bytes;
    for (Part& each : piece.parts) {
        const File& file = piece.job->file(each);
        const bool is_wanted = 2 * file.alignment_bytes() <= slack && wants_direct(piece, each);
        // The alignment is known only now, when the file has been opened with O_DIRECT.
        const std::uint64_t alignment = file.alignment_bytes();
        each.direct = is_wanted && 2 * alignment <= slack;
        if (each.direct) {
            slack -= 2 * alignment;
            where = up(where, alignment) + lead_of(file, piece.job->extent(each).offset + each.at);
        }
        each.where = where;
        where += each.length;
    }
}

Moved Pump::read_part(const Piece& piece, const Part& part, std::byte* base) {
    File& file = piece.job->file(part);
    const std::uint64_t offset = piece.job->extent(part).offset + part.at;
    std::byte* const to = base + part.where;
    return part.direct ? read_direct(file, offset, part.length, to - lead_of(file, offset))
                       : read_buffered(file, offset, part.length, to);
}

Moved Pump::write_part(const Piece& piece, const Part& part, const std::byte* base) {
    File& file = piece.job->file(part);
    const std::uint64_t offset = piece.job->extent(part).offset + part.at;
    const std::byte* const from = base + part.where;
    return part.direct ? write_direct(file, offset, part.length, from - lead_of(file, offset))
                       : write_buffered(file, offset, part.length, from);
}

void Pump::begin(std::size_t index, Piece& piece) {
    if (piece.job->device() == host_memory) {
        host_piece(piece);
        return;
    }
    Slot& slot = slots_[index];
    std::swap(slot.piece, piece);
    piece.job.reset();
    slot.direct_bytes = 0;
    std::uint32_t extent = slot.piece.parts.front().extent;
    try {
        Lane& lane = lane_of(slot.piece.job->device());
        slot.lane = &lane;
        lay_out(slot.piece);
        if (slot.piece.job->direction() == Direction::read) {
            begin_read(index, lane);
        } else {
            begin_write(index, lane);
        }
        lane.mark(index);
    } catch (const Error& error) {
        slot.piece.job->fail(extent, error.failure());
        // The copies on the device must be over before the memory is used again.
        if (slot.lane != nullptr) {
            slot.lane->drain();
        }
        give_up(slot.piece, error.failure());
        return;
    }
    slot.pending = true;
    ++pending_;
    next_ = (index + 1) % slots_.size();
}

void Pump::begin_read(std::size_t index, Lane& lane) {
    Slot& slot = slots_[index];
    Piece& piece = slot.piece;
    std::byte* const base = base_of(index, piece);
    for (Part& each : piece.parts) {
        Moved moved;
        try {
            moved = read_part(piece, each, base);
        } catch (const Error& error) {
            moved.failure = error.failure();
        }
        each.done = moved.bytes;
        slot.direct_bytes += moved.direct ? moved.bytes : 0;
        if (moved.failure) {
            piece.job->fail(each.extent, *moved.failure);
            break;
        }
    }
    if (piece.limited) {
        kept_ = piece.job;
        piece.limited = false;
    }
    runs_of(
        piece, [](const Part& part) { return part.done; },
        [&](std::uint64_t address, std::uint64_t where, std::uint64_t bytes) {
            lane.to_device(address, base + where, bytes);
        });
}

void Pump::begin_write(std::size_t index, Lane& lane) {
    const Piece& piece = slots_[index].piece;
    std::byte* const base = base_of(index, piece);
    runs_of(
        piece, [](const Part& part) { return part.length; },
        [&](std::uint64_t address, std::uint64_t where, std::uint64_t bytes) {
            lane.to_host(base + where, address, bytes);
        });
}

bool Pump::retire_oldest() {
    if (pending_ == 0) {
        return false;
    }
    const std::size_t count = slots_.size();
    retire((next_ + count - pending_) % count);
    return true;
}

void Pump::retire(std::size_t index) {
    Slot& slot = slots_[index];
    Piece& piece = slot.piece;
    slot.pending = false;
    --pending_;
    try {
        if (current_ != slot.lane) {
            slot.lane->make_current();
            current_ = slot.lane;
        }
        slot.lane->wait(index);
    } catch (const Error& error) {
        // The copy may still run although the wait failed. It must not write to memory that its owner frees.
        slot.lane->drain();
        give_up(piece, error.failure());
        return;
    }
    if (piece.job->direction() == Direction::write) {
        slot.direct_bytes = write_file(piece, base_of(index, piece));
    }
    finish(piece, slot.direct_bytes);
}

std::uint64_t Pump::write_file(Piece& piece, const std::byte* base) {
    std::uint64_t direct_bytes = 0;
    for (Part& each : piece.parts) {
        Moved moved;
        try {
            moved = write_part(piece, each, base);
        } catch (const Error& error) {
            moved.failure = error.failure();
        }
        each.done = moved.bytes;
        direct_bytes += moved.direct ? moved.bytes : 0;
        if (moved.failure) {
            piece.job->fail(each.extent, *moved.failure);
            break;
        }
    }
    release(piece);
    return direct_bytes;
}

// Host memory needs no staging, unless its alignment does not fit O_DIRECT.
void Pump::host_piece(Piece& piece) {
    std::uint64_t direct_bytes = 0;
    const bool reads = piece.job->direction() == Direction::read;
    for (Part& each : piece.parts) {
        Moved moved;
        try {
            File& file = piece.job->file(each);
            const Extent& extent = piece.job->extent(each);
            const std::uint64_t offset = extent.offset + each.at;
            auto* const memory = reinterpret_cast<std::byte*>(extent.address + each.at);
            each.direct = wants_direct(piece, each);
            const std::uint64_t odd = offset | each.length | reinterpret_cast<std::uintptr_t>(memory);
            bool staged = each.direct && (odd & (file.alignment_bytes() - 1)) != 0;
            if (staged && 2 * file.alignment_bytes() > slack_bytes) {
                staged = each.direct = false; // The ends would overlap the next worker's staging memory.
            }
            std::byte* const base = staged ? slab_ : memory;
            each.where = staged ? lead_of(file, offset) : 0;
            if (staged && !reads) {
                std::memcpy(base + each.where, memory, each.length);
            }
            moved = reads ? read_part(piece, each, base) : write_part(piece, each, base);
            if (staged && reads) {
                std::memcpy(memory, base + each.where, moved.bytes);
            }
        } catch (const Error& error) {
            moved.failure = error.failure();
        }
        each.done = moved.bytes;
        direct_bytes += moved.direct ? moved.bytes : 0;
        if (moved.failure) {
            piece.job->fail(each.extent, *moved.failure);
            break;
        }
    }
    finish(piece, direct_bytes);
}

void Pump::release(Piece& piece) {
    if (piece.limited) {
        piece.job->release(piece);
        dispatcher_.let_others_go_on();
    }
}

// None of the bytes of the piece count as arrived.
void Pump::give_up(Piece& piece, const Failure& failure) {
    piece.job->fail(piece.parts.front().extent, failure);
    for (Part& each : piece.parts) {
        each.done = 0;
    }
    finish(piece, 0);
}

void Pump::finish(Piece& piece, std::uint64_t direct_bytes) {
    release(piece);
    piece.job->settle(piece, direct_bytes);
    piece.job.reset();
}

} // namespace gdrkit::engine
