// What the loop does with an entry of a ring, and with a result of the server.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "usrbio/agent/loop.hpp"

namespace gdrkit::usrbio::agent {
namespace {

// How much of one ring is taken at once, by priority: a busy ring delays another one of its class by that at most.
constexpr std::array<std::size_t, priority_classes> share = {256, 128, 32};
// Every so many passes another class comes first, so that none waits for ever.
constexpr std::uint64_t normal_first_every = 8;
constexpr std::uint64_t low_first_every = 16;

// A lane has its turn for so many bytes.
constexpr std::uint64_t turn_bytes_least = 256 * 1024;

constexpr std::uint64_t forbid_read_holes = 2; // HF3FS_IOR_FORBID_READ_HOLES

constexpr std::uint64_t tag_of(std::uint32_t slot, std::uint32_t generation) noexcept {
    return std::uint64_t{generation} << 32 | slot;
}

} // namespace

bool Loop::drain_rings() {
    ++passes_;
    std::array<std::size_t, priority_classes> order = {0, 1, 2};
    if (passes_ % low_first_every == 0)
        order = {2, 0, 1};
    else if (passes_ % normal_first_every == 0)
        order = {1, 0, 2};
    bool worked = false;
    std::int64_t now = 0;
    for (const std::size_t priority : order) {
        auto& same = rings_[priority];
        if (same.empty())
            continue;
        if (now == 0)
            now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
        const std::size_t count = same.size();
        const std::size_t first = first_[priority]++ % count;
        std::vector<Ring*> broken;
        for (std::size_t step = 0; step < count; ++step) {
            Ring& ring = *same[(first + step) % count];
            worked |= drain(ring, now);
            if (ring.is_broken)
                broken.push_back(&ring);
        }
        for (Ring* ring : broken)
            broke(*ring);
    }
    if (!pending_.empty()) {
        if (is_connected_)
            statistics_.batches += connection_->queue(pending_);
        pending_.clear();
    }
    return worked;
}

bool Loop::drain(Ring& ring, std::int64_t now_ns) {
    if (ring.memory.was_cut()) {
        ring.is_broken = true;
        return true;
    }
    if (is_full())
        return false; // The server takes no more; what is queued waits in its ring.
    claimed_.resize(std::min(share[static_cast<std::size_t>(ring.spec.priority)], free_.size()));
    const std::size_t count = ring.side->claim(claimed_, now_ns);
    for (std::size_t index = 0; index < count; ++index)
        take(ring, claimed_[index]);
    ring.is_broken = ring.side->broken();
    return count != 0 || ring.is_broken;
}

// A ring whose indices make no sense is served no more. Who made it that way must make a new one.
void Loop::broke(Ring& ring) {
    ring.is_broken = true;
    ++statistics_.broken_rings;
    forget(ring);
    tell({Event::Kind::ring_broken, ring.client.number, ring.spec.id, 0});
}

void Loop::take(Ring& ring, const ClaimedOperation& entry) {
    Buffer* buffer = nullptr;
    File* file = nullptr;
    const int refusal = check(ring, entry, buffer, file);
    if (refusal != 0) {
        ++statistics_.refused;
        answer(ring, entry.position, refusal);
    } else {
        start(ring, entry, *buffer, *file);
    }
}

void Loop::answer(Ring& ring, std::uint32_t position, std::int64_t result) {
    // It was claimed, so it can be completed; a broken ring forgets it without telling anyone.
    ring.side->complete(position, result);
    if (!ring.is_broken && !std::exchange(ring.is_touched, true))
        touched_.push_back(&ring);
}

// 0, or the negative errno that the entry is answered with. The entry is a copy: nobody changes it meanwhile.
int Loop::check(Ring& ring, const ClaimedOperation& entry, Buffer*& buffer, File*& file) {
    const Arguments& wanted = entry.arguments;
    Id id;
    std::copy_n(wanted.buffer_id, id.size(), id.begin());
    const auto found = ring.client.buffers.find(id);
    if (found == ring.client.buffers.end() || found->second->is_closing)
        return -EACCES;
    buffer = found->second.get();
    if (buffer->is_refused)
        return -EREMOTEIO;
    const BufferSpec& spec = buffer->spec;
    if (wanted.length == 0 || wanted.buffer_offset > spec.length || wanted.length > spec.length - wanted.buffer_offset)
        return -EINVAL;
    if (spec.block_bytes != 0 &&
        wanted.buffer_offset / spec.block_bytes != (wanted.buffer_offset + wanted.length - 1) / spec.block_bytes)
        return -EINVAL;
    constexpr auto file_end = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (wanted.file_offset > file_end || wanted.length > file_end - wanted.file_offset)
        return -EINVAL;
    const auto known = ring.client.files.find(wanted.file_inode);
    if (known == ring.client.files.end() || known->second->is_closing)
        return -EBADF;
    file = known->second.get();
    if (!(ring.spec.for_read ? file->spec.readable : file->spec.writable))
        return -EACCES;
    return is_connected_ ? 0 : -EREMOTEIO;
}

std::uint16_t Loop::choose_lane(Buffer& buffer, std::uint64_t length) const {
    // Small operations that come together stay together: what a lane gets at once is one list for its NIC.
    const std::uint64_t before = std::exchange(buffer.turn_bytes, buffer.turn_bytes + length);
    if (before != 0 && before < turn_bytes_least && buffer.lane < lanes_.size())
        return buffer.lane;
    buffer.turn_bytes = length;
    const auto& near = buffer.spec.near;
    // The next lane of a near NIC; without any, the next lane.
    for (std::size_t step = 1; step <= lanes_.size(); ++step) {
        const std::size_t lane = (buffer.lane + step) % lanes_.size();
        if (near.empty() || std::find(near.begin(), near.end(), lanes_[lane]) != near.end())
            return buffer.lane = static_cast<std::uint16_t>(lane);
    }
    return buffer.lane = static_cast<std::uint16_t>((buffer.lane + 1U) % lanes_.size());
}

void Loop::start(Ring& ring, const ClaimedOperation& entry, Buffer& buffer, File& file) {
    if (!has_flights())
        heard_ = Clock::now();
    const std::uint32_t slot = free_.back();
    free_.pop_back();
    Flight& flight = flights_[slot];
    flight.ring = &ring;
    flight.buffer = &buffer;
    flight.file = &file;
    flight.length = entry.arguments.length;
    flight.buffer_offset = entry.arguments.buffer_offset;
    flight.file_offset = entry.arguments.file_offset;
    flight.position = entry.position;
    ++flight.generation;
    ++buffer.in_flight;
    ++file.in_flight;
    ++statistics_.operations;
    send(slot);
}

// By the keys, handles and lanes of now.
void Loop::send(std::uint32_t slot) {
    const Flight& flight = flights_[slot];
    const Ring& ring = *flight.ring;
    const File& file = *flight.file;
    Buffer& buffer = *flight.buffer;
    const std::uint16_t lane = choose_lane(buffer, flight.length);
    const Key& key = buffer.spec.keys.at(lanes_[lane]);
    storage::Operation& operation = pending_.emplace_back();
    operation.tag = tag_of(slot, flight.generation);
    operation.handle = ring.spec.for_read ? file.spec.read_handle : file.spec.write_handle;
    operation.file_offset = flight.file_offset;
    operation.length = flight.length;
    operation.remote_address = key.address + flight.buffer_offset;
    operation.rkey = key.rkey;
    operation.lane = lane;
    operation.opcode = static_cast<std::uint8_t>(ring.spec.for_read ? storage::Opcode::read : storage::Opcode::write);
    if (ring.spec.for_read && (ring.spec.flags & forbid_read_holes) != 0)
        operation.flags = storage::forbid_holes;
}

bool Loop::send_and_receive() {
    if (!is_connected_)
        return false;
    bool worked = false;
    bool is_alive = true;
    if (connection_->has_backlog()) {
        is_alive = connection_->flush();
        worked = !connection_->has_backlog();
    }
    bool has_heard = false;
    // A server that takes nothing more may have said why.
    is_alive &= connection_->receive([&](const storage::Result& result) {
        has_heard = true;
        return finish(result.tag, result.result);
    });
    if (has_heard)
        heard_ = Clock::now();
    worked |= has_heard;
    if (!is_alive || has_refusal_) {
        lost(Event::Kind::disconnected);
        return true;
    }
    return worked;
}

// The end of a connection. Its operations stay in flight, since the server may still reach memory by its lanes: the
// owner fails those, and then calls disconnect().
void Loop::lost(Event::Kind kind) {
    is_connected_ = false;
    ++statistics_.disconnects;
    tell({kind, 0, {}, generation_});
}

// A server that hangs ends no connection, so its silence has to. Any result counts as a word of it: how long a single
// operation takes depends on what was queued before it.
bool Loop::is_silent(Clock::time_point now) {
    if (!is_connected_ || !has_flights() || now - heard_ < options_.silence)
        return false;
    lost(Event::Kind::silent);
    return true;
}

// False: no answer to anything that was asked.
bool Loop::finish(std::uint64_t tag, std::int64_t result) {
    const auto slot = static_cast<std::uint32_t>(tag);
    if (slot >= flights_.size())
        return false;
    const Flight& flight = flights_[slot];
    constexpr std::int64_t errno_max = 4095;
    if (flight.ring == nullptr || tag_of(slot, flight.generation) != tag || result < -errno_max ||
        (result > 0 && static_cast<std::uint64_t>(result) > flight.length))
        return false;
    if (result == -EREMOTEIO) {
        // The client's own doing: it cut the memory short, or freed it. The session ends with this.
        has_refusal_ = true;
        flight.buffer->is_refused = true;
    }
    complete(slot, result);
    return true;
}

void Loop::complete(std::uint32_t slot, std::int64_t result) {
    Flight& flight = flights_[slot];
    Ring& ring = *flight.ring;
    Buffer& buffer = *flight.buffer;
    File& file = *flight.file;
    ++statistics_.completions;
    if (result < 0)
        ++statistics_.failed;
    else
        statistics_.bytes += static_cast<std::uint64_t>(result);
    answer(ring, flight.position, result);
    flight.ring = nullptr;
    free_.push_back(slot);
    Client& client = ring.client;
    const auto release = [](std::vector<Drained>& waiting) {
        for (const Drained& one : waiting)
            one->set_value();
    };
    if (--buffer.in_flight == 0 && buffer.is_closing) {
        auto gone = client.buffers.extract(buffer.spec.id);
        release(gone.mapped()->waiting);
    }
    if (--file.in_flight == 0 && file.is_closing) {
        auto gone = client.files.extract(file.spec.inode);
        release(gone.mapped()->waiting);
    }
    if (ring.is_closing && ring.side->outstanding() == 0) {
        if (ring.is_touched) {
            ring.side->flush();
            std::erase(touched_, &ring);
        }
        auto gone = client.rings.extract(ring.spec.id);
        gone.mapped().ring.reset();
        release(gone.mapped().waiting);
    }
}

void Loop::announce() {
    for (Ring* ring : touched_) {
        ring->is_touched = false;
        ring->side->flush();
    }
    touched_.clear();
}

} // namespace gdrkit::usrbio::agent
