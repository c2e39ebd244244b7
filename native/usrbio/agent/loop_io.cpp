// The part of the loop that handles entries of rings and results of the server.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "usrbio/agent/loop.hpp"

namespace gdrkit::usrbio::agent {
namespace {

// Largest number of entries taken from one ring at once, by priority. It bounds the delay of other rings of that class.
constexpr std::array<std::size_t, priority_classes> entries_per_pass = {256, 128, 32};
// After this many passes another class comes first, so that every class progresses.
constexpr std::uint64_t normal_first_every = 8;
constexpr std::uint64_t low_first_every = 16;

// Bytes after which the operations of a buffer move to the next queue pair.
constexpr std::uint64_t turn_bytes_min = 256 * 1024;

constexpr std::uint64_t forbid_read_holes = 2; // HF3FS_IOR_FORBID_READ_HOLES

constexpr std::uint64_t tag_of(std::uint32_t index, std::uint32_t generation) noexcept {
    return std::uint64_t{generation} << 32 | index;
}

} // namespace

bool Loop::drain_rings() {
    ++pass_count_;
    std::array<std::size_t, priority_classes> order = {0, 1, 2};
    if (pass_count_ % low_first_every == 0)
        order = {2, 0, 1};
    else if (pass_count_ % normal_first_every == 0)
        order = {1, 0, 2};
    bool has_progress = false;
    std::int64_t now = 0;
    for (const std::size_t priority : order) {
        auto& rings = rings_[priority];
        if (rings.empty())
            continue;
        if (now == 0)
            now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
        const std::size_t count = rings.size();
        const std::size_t first = first_ring_[priority]++ % count;
        std::vector<Ring*> broken;
        for (std::size_t step = 0; step < count; ++step) {
            Ring& ring = *rings[(first + step) % count];
            has_progress |= drain(ring, now);
            if (ring.is_broken)
                broken.push_back(&ring);
        }
        for (Ring* ring : broken)
            report_broken(*ring);
    }
    if (!unsent_.empty()) {
        if (is_connected_)
            statistics_.batches += connection_->queue(unsent_);
        unsent_.clear();
    }
    return has_progress;
}

bool Loop::drain(Ring& ring, std::int64_t now_ns) {
    if (ring.memory.was_truncated()) {
        ring.is_broken = true;
        return true;
    }
    if (is_full())
        return false; // The server accepts no more operations; they wait in their ring.
    claimed_.resize(std::min(entries_per_pass[static_cast<std::size_t>(ring.spec.priority)], free_indices_.size()));
    const std::size_t count = ring.side->claim(claimed_, now_ns);
    for (std::size_t index = 0; index < count; ++index)
        handle_entry(ring, claimed_[index]);
    ring.is_broken = ring.side->broken();
    return count != 0 || ring.is_broken;
}

// The loop stops serving a ring with invalid indices. Its client must create a new ring.
void Loop::report_broken(Ring& ring) {
    ring.is_broken = true;
    ++statistics_.broken_rings;
    stop_draining(ring);
    report({Event::Kind::ring_broken, ring.client.number, ring.spec.id, 0});
}

void Loop::handle_entry(Ring& ring, const ClaimedOperation& entry) {
    Buffer* buffer = nullptr;
    File* file = nullptr;
    const int refusal = check(ring, entry, buffer, file);
    if (refusal != 0) {
        ++statistics_.refused;
        post_completion(ring, entry.position, refusal);
    } else {
        begin(ring, entry, *buffer, *file);
    }
}

void Loop::post_completion(Ring& ring, std::uint32_t position, std::int64_t result) {
    // It was claimed, so it can be completed. A broken ring reports nothing to its application.
    ring.side->complete(position, result);
    if (!ring.is_broken && !std::exchange(ring.has_unpublished, true))
        unpublished_.push_back(&ring);
}

// Returns 0, or the negative errno that completes the entry. The entry is a copy that its client cannot change.
int Loop::check(Ring& ring, const ClaimedOperation& entry, Buffer*& buffer, File*& file) {
    const Arguments& arguments = entry.arguments;
    Id id;
    std::copy_n(arguments.buffer_id, id.size(), id.begin());
    const auto known_buffer = ring.client.buffers.find(id);
    if (known_buffer == ring.client.buffers.end() || known_buffer->second->is_closing)
        return -EACCES;
    buffer = known_buffer->second.get();
    if (buffer->is_refused)
        return -EREMOTEIO;
    const BufferSpec& spec = buffer->spec;
    if (arguments.length == 0 || arguments.buffer_offset > spec.length ||
        arguments.length > spec.length - arguments.buffer_offset)
        return -EINVAL;
    if (spec.block_bytes != 0 && arguments.buffer_offset / spec.block_bytes !=
                                     (arguments.buffer_offset + arguments.length - 1) / spec.block_bytes)
        return -EINVAL;
    constexpr auto file_end = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (arguments.file_offset > file_end || arguments.length > file_end - arguments.file_offset)
        return -EINVAL;
    const auto known_file = ring.client.files.find(arguments.file_inode);
    if (known_file == ring.client.files.end() || known_file->second->is_closing)
        return -EBADF;
    file = known_file->second.get();
    if (!(ring.spec.for_read ? file->spec.readable : file->spec.writable))
        return -EACCES;
    return is_connected_ ? 0 : -EREMOTEIO;
}

std::uint16_t Loop::choose_queue_pair(Buffer& buffer, std::uint64_t length) const {
    // Small operations that arrive together go to the same queue pair, so that its NIC gets them as one list.
    const std::uint64_t before = std::exchange(buffer.turn_bytes, buffer.turn_bytes + length);
    if (before != 0 && before < turn_bytes_min && buffer.queue_pair < queue_pair_nics_.size())
        return buffer.queue_pair;
    buffer.turn_bytes = length;
    const auto& preferred = buffer.spec.preferred_nics;
    // Take the next queue pair of a preferred NIC, or the next queue pair if none is preferred.
    for (std::size_t step = 1; step <= queue_pair_nics_.size(); ++step) {
        const std::size_t queue_pair = (buffer.queue_pair + step) % queue_pair_nics_.size();
        if (preferred.empty() ||
            std::find(preferred.begin(), preferred.end(), queue_pair_nics_[queue_pair]) != preferred.end())
            return buffer.queue_pair = static_cast<std::uint16_t>(queue_pair);
    }
    return buffer.queue_pair = static_cast<std::uint16_t>((buffer.queue_pair + 1U) % queue_pair_nics_.size());
}

void Loop::begin(Ring& ring, const ClaimedOperation& entry, Buffer& buffer, File& file) {
    if (!has_in_flight())
        last_result_time_ = Clock::now();
    const std::uint32_t index = free_indices_.back();
    free_indices_.pop_back();
    InFlight& operation = in_flight_[index];
    operation.ring = &ring;
    operation.buffer = &buffer;
    operation.file = &file;
    operation.length = entry.arguments.length;
    operation.buffer_offset = entry.arguments.buffer_offset;
    operation.file_offset = entry.arguments.file_offset;
    operation.position = entry.position;
    ++operation.generation;
    ++buffer.in_flight;
    ++file.in_flight;
    ++statistics_.operations;
    send(index);
}

// Uses the current keys, handles and queue pairs.
void Loop::send(std::uint32_t index) {
    const InFlight& operation = in_flight_[index];
    const Ring& ring = *operation.ring;
    const File& file = *operation.file;
    Buffer& buffer = *operation.buffer;
    const std::uint16_t queue_pair = choose_queue_pair(buffer, operation.length);
    const Key& key = buffer.spec.keys.at(queue_pair_nics_[queue_pair]);
    storage::Operation& request = unsent_.emplace_back();
    request.tag = tag_of(index, operation.generation);
    request.handle = ring.spec.for_read ? file.spec.read_handle : file.spec.write_handle;
    request.file_offset = operation.file_offset;
    request.length = operation.length;
    request.remote_address = key.address + operation.buffer_offset;
    request.rkey = key.rkey;
    request.queue_pair = queue_pair;
    request.opcode = static_cast<std::uint8_t>(ring.spec.for_read ? storage::Opcode::read : storage::Opcode::write);
    if (ring.spec.for_read && (ring.spec.flags & forbid_read_holes) != 0)
        request.flags = storage::forbid_holes;
}

bool Loop::send_and_receive() {
    if (!is_connected_)
        return false;
    bool has_progress = false;
    bool is_alive = true;
    if (connection_->has_backlog()) {
        is_alive = connection_->flush();
        has_progress = !connection_->has_backlog();
    }
    bool has_result = false;
    // Receive even if sending failed: the server may have sent a reason.
    is_alive &= connection_->receive([&](const storage::Result& result) {
        has_result = true;
        return handle_result(result.tag, result.result);
    });
    if (has_result)
        last_result_time_ = Clock::now();
    has_progress |= has_result;
    if (!is_alive || has_refusal_) {
        report_lost(Event::Kind::disconnected);
        return true;
    }
    return has_progress;
}

// Reports the end of a connection. Its operations stay in flight, because the server may still access memory by its
// queue pairs. The agent disables these, and then calls disconnect().
void Loop::report_lost(Event::Kind kind) {
    is_connected_ = false;
    ++statistics_.disconnects;
    report({kind, 0, {}, generation_});
}

// A server that hangs does not close the connection, so the loop must detect its silence. Any result counts, because
// the duration of one operation depends on the operations queued before it.
bool Loop::is_silent(Clock::time_point now) {
    if (!is_connected_ || !has_in_flight() || now - last_result_time_ < options_.silence)
        return false;
    report_lost(Event::Kind::silent);
    return true;
}

// Returns false if the result does not belong to an operation in flight.
bool Loop::handle_result(std::uint64_t tag, std::int64_t result) {
    const auto index = static_cast<std::uint32_t>(tag);
    if (index >= in_flight_.size())
        return false;
    const InFlight& operation = in_flight_[index];
    constexpr std::int64_t errno_max = 4095;
    if (operation.ring == nullptr || tag_of(index, operation.generation) != tag || result < -errno_max ||
        (result > 0 && static_cast<std::uint64_t>(result) > operation.length))
        return false;
    if (result == -EREMOTEIO) {
        // The client caused this: it truncated or freed the memory. The error ends the session.
        has_refusal_ = true;
        operation.buffer->is_refused = true;
    }
    complete(index, result);
    return true;
}

void Loop::complete(std::uint32_t index, std::int64_t result) {
    InFlight& operation = in_flight_[index];
    Ring& ring = *operation.ring;
    Buffer& buffer = *operation.buffer;
    File& file = *operation.file;
    ++statistics_.completions;
    if (result < 0)
        ++statistics_.failed;
    else
        statistics_.bytes += static_cast<std::uint64_t>(result);
    post_completion(ring, operation.position, result);
    operation.ring = nullptr;
    free_indices_.push_back(index);
    Client& client = ring.client;
    const auto release = [](std::vector<Drained>& waiters) {
        for (const Drained& waiter : waiters)
            waiter->set_value();
    };
    if (--buffer.in_flight == 0 && buffer.is_closing) {
        auto removed = client.buffers.extract(buffer.spec.id);
        release(removed.mapped()->drain_waiters);
    }
    if (--file.in_flight == 0 && file.is_closing) {
        auto removed = client.files.extract(file.spec.inode);
        release(removed.mapped()->drain_waiters);
    }
    if (ring.is_closing && ring.side->outstanding() == 0) {
        if (ring.has_unpublished) {
            ring.side->flush();
            std::erase(unpublished_, &ring);
        }
        auto removed = client.rings.extract(ring.spec.id);
        removed.mapped().ring.reset();
        release(removed.mapped().drain_waiters);
    }
}

void Loop::publish_completions() {
    for (Ring* ring : unpublished_) {
        ring->has_unpublished = false;
        ring->side->flush();
    }
    unpublished_.clear();
}

} // namespace gdrkit::usrbio::agent
