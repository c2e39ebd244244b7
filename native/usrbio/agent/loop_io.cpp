// The part of class Loop that handles entries of rings and results of the storage server.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "usrbio/agent/loop.hpp"

namespace gdrkit::usrbio::agent {
namespace {

// Largest number of entries claimed from one ring in one pass, by priority (high, normal, low). This limit bounds the
// delay of other rings of the same priority.
constexpr std::array<std::size_t, priority_class_count> entries_per_pass = {256, 128, 32};
// Every 8th pass drains the rings of normal priority first, and every 16th pass the rings of low priority. So rings of
// every priority make progress.
constexpr std::uint64_t normal_first_every = 8;
constexpr std::uint64_t low_first_every = 16;

// After this many bytes, the operations of a buffer move to the next queue pair.
constexpr std::uint64_t bytes_per_queue_pair = 256 * 1024;

constexpr std::uint64_t forbid_read_holes = 2; // HF3FS_IOR_FORBID_READ_HOLES

// Number of bytes of local reads for one ring in one pass. After these bytes, the loop sends the other claimed entries
// to the storage server and continues with the next ring.
constexpr std::uint64_t local_bytes_per_pass = 1024 * 1024;
// Number of bytes of local reads after which their completions are published. The application then works on them while
// the loop continues.
constexpr std::uint64_t publish_after_bytes = 256 * 1024;

constexpr std::uint64_t make_tag(std::uint32_t index, std::uint32_t generation) noexcept {
    return std::uint64_t{generation} << 32 | index; // The generation tells a late result from a result of a new use.
}

} // namespace

// Claims and handles entries of all rings in the order of the priorities, and queues the requests to the server.
// Returns whether there was work.
bool Loop::drain_rings() {
    ++pass_count_;
    std::array<std::size_t, priority_class_count> priority_order = {0, 1, 2};
    if (pass_count_ % low_first_every == 0)
        priority_order = {2, 0, 1};
    else if (pass_count_ % normal_first_every == 0)
        priority_order = {1, 0, 2};
    bool has_progress = false;
    std::int64_t now_ns = 0;
    for (const std::size_t priority : priority_order) {
        auto& rings = rings_[priority];
        if (rings.empty())
            continue;
        if (now_ns == 0)
            now_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
        const std::size_t rings_count = rings.size();
        const std::size_t first_index = rotation_counts_[priority]++ % rings_count;
        std::vector<Ring*> broken_rings;
        for (std::size_t step = 0; step < rings_count; ++step) {
            Ring& ring = *rings[(first_index + step) % rings_count];
            has_progress |= drain_ring(ring, now_ns);
            if (ring.is_broken)
                broken_rings.push_back(&ring);
        }
        for (Ring* ring : broken_rings)
            report_broken_ring(*ring);
    }
    if (!unsent_requests_.empty()) {
        if (is_connected_)
            statistics_.batches += connection_->queue(unsent_requests_);
        unsent_requests_.clear();
    }
    return has_progress;
}

// Claims and handles entries of one ring until the ring is empty or a limit of this pass is reached. Sets
// ring.is_broken if the ring cannot be served any more. Returns whether there was work.
bool Loop::drain_ring(Ring& ring, std::int64_t now_ns) {
    if (ring.memory.was_truncated()) {
        ring.is_broken = true;
        return true;
    }
    if (is_full())
        return false; // The loop can send no more operations now, so the entries wait in the ring.
    std::size_t remaining_entry_count = entries_per_pass[static_cast<std::size_t>(ring.spec.priority)];
    claimed_entries_.resize(entries_per_pass.front());
    const std::uint64_t local_bytes_limit = local_bytes_limit_ = local_bytes_ + local_bytes_per_pass;
    bool has_claimed_all = false;
    bool has_claimed = false;
    do {
        // Estimate how many entries fit into the bytes that this pass may still copy. The estimate assumes that each
        // entry is as long as the last claimed one.
        const std::uint64_t fitting_count =
            (local_bytes_limit - local_bytes_) / std::max<std::uint64_t>(ring.last_claimed_length, 1);
        const std::size_t claim_count_max = std::min(
            {remaining_entry_count, free_indices_.size(), std::max<std::size_t>(std::size_t{1}, fitting_count)});
        const std::size_t claimed_count = ring.agent_side->claim({claimed_entries_.data(), claim_count_max}, now_ns);
        last_entry_objects_ = {};
        for (std::size_t index = 0; index < claimed_count; ++index)
            handle_entry(ring, claimed_entries_[index]);
        run_local_reads(ring);
        if (claimed_count != 0)
            ring.last_claimed_length = claimed_entries_[claimed_count - 1].arguments.length;
        has_claimed |= claimed_count != 0;
        has_claimed_all = claimed_count < claim_count_max;
        remaining_entry_count -= claimed_count;
    } while (!has_claimed_all && remaining_entry_count != 0 && !free_indices_.empty() &&
             local_bytes_ < local_bytes_limit);
    ring.is_broken = ring.agent_side->is_broken();
    return has_claimed || ring.is_broken;
}

// Stops serving a broken ring and reports it to the agent. The client must create a new ring.
void Loop::report_broken_ring(Ring& ring) {
    ring.is_broken = true;
    ++statistics_.broken_rings;
    stop_draining(ring);
    add_event({Event::Kind::ring_broken, ring.client.number, ring.spec.id, 0});
}

void Loop::handle_entry(Ring& ring, const ClaimedOperation& entry) {
    Buffer* buffer = nullptr;
    File* file = nullptr;
    const int status = check_entry(ring, entry, buffer, file);
    if (status != 0) {
        ++statistics_.refused;
        post_completion(ring, entry.position, status);
    } else if (!add_local_read(ring, entry, *buffer, *file)) {
        start_operation(ring, entry, *buffer, *file);
    }
}

// Adds the entry to the batch of local reads, which the loop executes itself. Such a read copies bytes from the page
// cache directly to host memory, without the server, its staging memory and the NIC. Returns false if the storage
// server has to execute the operation.
bool Loop::add_local_read(Ring& ring, const ClaimedOperation& entry, Buffer& buffer, File& file) {
    const Arguments& arguments = entry.arguments;
    if (!ring.spec.for_read || (ring.spec.flags & forbid_read_holes) != 0 || !file.local_file ||
        file.spec.read_handle == 0 || !buffer.guard || buffer.guard->has_bus_error() ||
        arguments.length > local_read_bytes_max || local_bytes_ + local_reader_.requested_bytes() >= local_bytes_limit_)
        return false;
    auto* const destination = reinterpret_cast<std::byte*>(buffer.spec.mapping + arguments.buffer_offset);
    if (!local_reader_.add(*file.local_file, arguments.file_offset, {destination, arguments.length}))
        return false;
    local_reads_.push_back({&entry, &buffer, &file});
    if (local_reader_.requested_bytes() >= publish_after_bytes)
        run_local_reads(ring);
    return true;
}

// Executes the local reads of the batch. The storage server executes the reads that fail.
void Loop::run_local_reads(Ring& ring) {
    if (local_reads_.empty())
        return;
    local_bytes_ += local_reader_.run(ring.agent_side->application_processor());
    for (std::size_t index = 0; index < local_reads_.size(); ++index) {
        const auto& [entry, buffer, file] = local_reads_[index];
        const std::optional<std::int64_t> result = local_reader_.result(index);
        // After a bus error, a page of zeros replaces the missing page in the agent's mapping. The batch may have
        // copied bytes to that page, which the client does not see.
        if (!result || buffer->guard->has_bus_error()) {
            start_operation(ring, *entry, *buffer, *file);
            continue;
        }
        ++statistics_.operations;
        ++statistics_.local_reads;
        ++statistics_.completions;
        statistics_.bytes += static_cast<std::uint64_t>(*result);
        post_completion(ring, entry->position, *result);
    }
    local_reads_.clear();
    local_reader_.clear();
    if (!ring.is_broken)
        ring.agent_side->flush(); // The ring stays in unpublished_rings_, for the completions that follow.
}

void Loop::post_completion(Ring& ring, std::uint32_t position, std::int64_t result) {
    // The position was claimed, so complete() returns true. The completions of a broken ring are not published.
    ring.agent_side->complete(position, result);
    if (!ring.is_broken && !std::exchange(ring.has_unpublished, true))
        unpublished_rings_.push_back(&ring);
}

// Checks an entry, and sets `buffer` and `file` to the objects that the entry names. Returns 0, or the negative errno
// with which the loop completes the entry. `entry` is a copy that the client cannot change.
int Loop::check_entry(Ring& ring, const ClaimedOperation& entry, Buffer*& buffer, File*& file) {
    const Arguments& arguments = entry.arguments;
    if (last_entry_objects_.buffer == nullptr ||
        !std::equal(last_entry_objects_.id.begin(), last_entry_objects_.id.end(), arguments.buffer_id)) {
        std::copy_n(arguments.buffer_id, last_entry_objects_.id.size(), last_entry_objects_.id.begin());
        const auto buffer_entry = ring.client.buffers.find(last_entry_objects_.id);
        last_entry_objects_.buffer = buffer_entry == ring.client.buffers.end() ? nullptr : buffer_entry->second.get();
    }
    buffer = last_entry_objects_.buffer;
    if (buffer == nullptr || buffer->is_closing)
        return -EACCES;
    if (buffer->is_refused)
        return -EREMOTEIO;
    const BufferSpec& spec = buffer->spec;
    if (arguments.length == 0 || arguments.buffer_offset > spec.length ||
        arguments.length > spec.length - arguments.buffer_offset)
        return -EINVAL;
    // The bytes of an operation must be in a single block of the buffer.
    if (spec.block_bytes != 0 && arguments.buffer_offset / spec.block_bytes !=
                                     (arguments.buffer_offset + arguments.length - 1) / spec.block_bytes)
        return -EINVAL;
    constexpr auto file_offset_max = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (arguments.file_offset > file_offset_max || arguments.length > file_offset_max - arguments.file_offset)
        return -EINVAL;
    if (last_entry_objects_.file == nullptr || last_entry_objects_.file->spec.inode != arguments.file_inode) {
        const auto file_entry = ring.client.files.find(arguments.file_inode);
        last_entry_objects_.file = file_entry == ring.client.files.end() ? nullptr : file_entry->second.get();
    }
    file = last_entry_objects_.file;
    if (file == nullptr || file->is_closing)
        return -EBADF;
    if (!(ring.spec.for_read ? file->spec.readable : file->spec.writable))
        return -EACCES;
    return is_connected_ ? 0 : -EREMOTEIO;
}

// Returns the index of the queue pair for the next operation of the buffer, which has `length` bytes.
std::uint16_t Loop::choose_queue_pair(Buffer& buffer, std::uint64_t length) const {
    // Small operations that follow each other use the same queue pair, so that the server posts them to the NIC as one
    // list.
    const std::uint64_t bytes_before = std::exchange(buffer.queue_pair_bytes, buffer.queue_pair_bytes + length);
    if (bytes_before != 0 && bytes_before < bytes_per_queue_pair && buffer.queue_pair_index < queue_pair_nics_.size())
        return buffer.queue_pair_index;
    buffer.queue_pair_bytes = length;
    const auto& preferred_nics = buffer.spec.preferred_nics;
    // Choose the next queue pair of a preferred NIC. If there is none, or the buffer prefers no NIC, choose the next
    // queue pair.
    for (std::size_t step = 1; step <= queue_pair_nics_.size(); ++step) {
        const std::size_t queue_pair_index = (buffer.queue_pair_index + step) % queue_pair_nics_.size();
        if (preferred_nics.empty() || std::find(preferred_nics.begin(), preferred_nics.end(),
                                                queue_pair_nics_[queue_pair_index]) != preferred_nics.end())
            return buffer.queue_pair_index = static_cast<std::uint16_t>(queue_pair_index);
    }
    return buffer.queue_pair_index =
               static_cast<std::uint16_t>((buffer.queue_pair_index + 1U) % queue_pair_nics_.size());
}

// Records the operation of an entry in in_flight_, and adds its request to unsent_requests_.
void Loop::start_operation(Ring& ring, const ClaimedOperation& entry, Buffer& buffer, File& file) {
    if (!has_in_flight())
        silence_start_time_ = Clock::now();
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
    ++buffer.in_flight_count;
    ++file.in_flight_count;
    ++statistics_.operations;
    add_request(index);
}

// Adds the request of an operation in flight to unsent_requests_. connect() calls this function again for operations
// that waited for a new connection, because keys, file handles and queue pairs have changed by then.
void Loop::add_request(std::uint32_t index) {
    const InFlight& operation = in_flight_[index];
    const Ring& ring = *operation.ring;
    const File& file = *operation.file;
    Buffer& buffer = *operation.buffer;
    const std::uint16_t queue_pair_index = choose_queue_pair(buffer, operation.length);
    const RemoteKey& remote_key = buffer.spec.remote_keys.at(queue_pair_nics_[queue_pair_index]);
    storage::Operation& request = unsent_requests_.emplace_back();
    request.tag = make_tag(index, operation.generation);
    request.handle = ring.spec.for_read ? file.spec.read_handle : file.spec.write_handle;
    request.file_offset = operation.file_offset;
    request.length = operation.length;
    request.remote_address = remote_key.address + operation.buffer_offset;
    request.rkey = remote_key.rkey;
    request.queue_pair = queue_pair_index;
    request.opcode = static_cast<std::uint8_t>(ring.spec.for_read ? storage::Opcode::read : storage::Opcode::write);
    if (ring.spec.for_read && (ring.spec.flags & forbid_read_holes) != 0)
        request.flags = storage::forbid_holes;
}

// Sends the frames that wait in the connection, and handles the results that have arrived. Returns whether there was
// progress; the end of the connection counts as progress.
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
    // Receive even if sending failed, because the server may have sent results before it closed the connection.
    is_alive &= connection_->receive([&](const storage::Result& result) {
        has_result = true;
        return handle_result(result.tag, result.result);
    });
    if (has_result)
        silence_start_time_ = Clock::now();
    has_progress |= has_result;
    if (!is_alive || has_memory_refusal_) {
        report_lost_connection(Event::Kind::disconnected);
        return true;
    }
    return has_progress;
}

// Reports the end of the connection to the agent. The operations stay in flight, because the server may still access
// memory by its queue pairs. The agent moves the queue pairs to the error state, and then calls disconnect().
void Loop::report_lost_connection(Event::Kind kind) {
    is_connected_ = false;
    ++statistics_.disconnects;
    add_event({kind, 0, {}, connection_generation_});
}

// If the server has operations and has returned no result for too long, reports the connection as lost and returns
// true. This is needed because a server that hangs does not close the connection. A result of any operation restarts
// the timeout, because the duration of one operation depends on the operations queued before it.
bool Loop::report_silent_server(Clock::time_point now) {
    if (!is_connected_ || !has_in_flight() || now - silence_start_time_ < options_.server_timeout)
        return false;
    report_lost_connection(Event::Kind::silent);
    return true;
}

// Completes the operation with `tag`. Returns false if no operation in flight has this tag, or if the result is
// invalid.
bool Loop::handle_result(std::uint64_t tag, std::int64_t result) {
    const auto index = static_cast<std::uint32_t>(tag); // The low 32 bits; see make_tag().
    if (index >= in_flight_.size())
        return false;
    const InFlight& operation = in_flight_[index];
    constexpr std::int64_t errno_max = 4095; // MAX_ERRNO of the Linux kernel.
    if (operation.ring == nullptr || make_tag(index, operation.generation) != tag || result < -errno_max ||
        (result > 0 && static_cast<std::uint64_t>(result) > operation.length))
        return false;
    if (result == -EREMOTEIO) {
        // A NIC refused the memory, because its owner truncated or freed it. This error ends the session.
        has_memory_refusal_ = true;
        operation.buffer->is_refused = true;
    }
    complete_operation(index, result);
    return true;
}

// Ends an operation in flight: posts its completion, frees its element of in_flight_, and removes each closing object
// whose last operation this was.
void Loop::complete_operation(std::uint32_t index, std::int64_t result) {
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
    const auto fulfill = [](std::vector<DrainPromise>& promises) {
        for (const DrainPromise& promise : promises)
            promise->set_value();
    };
    if (--buffer.in_flight_count == 0 && buffer.is_closing) {
        auto removed_entry = client.buffers.extract(buffer.spec.id);
        fulfill(removed_entry.mapped()->drain_promises);
    }
    if (--file.in_flight_count == 0 && file.is_closing) {
        auto removed_entry = client.files.extract(file.spec.inode);
        fulfill(removed_entry.mapped()->drain_promises);
    }
    if (ring.is_closing && ring.agent_side->outstanding() == 0) {
        if (ring.has_unpublished) {
            ring.agent_side->flush();
            std::erase(unpublished_rings_, &ring);
        }
        auto removed_entry = client.rings.extract(ring.spec.id);
        removed_entry.mapped().ring.reset();
        fulfill(removed_entry.mapped().drain_promises);
    }
}

void Loop::publish_completions() {
    for (Ring* ring : unpublished_rings_) {
        ring->has_unpublished = false;
        ring->agent_side->flush();
    }
    unpublished_rings_.clear();
}

} // namespace gdrkit::usrbio::agent
