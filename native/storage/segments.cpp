// The part of a storage server's Session that moves bytes from files through staging memory to the client, and back.
// The session moves each operation in segments. Each segment has one staging buffer.
#include <unistd.h>

#include <cerrno>

#include "storage/crc32c.hpp"
#include "storage/session_parts.hpp"

namespace gdrkit::storage {

namespace {

// Largest number of transfers of one segment. If a segment has more holes, the server sends the remaining holes as
// zeros.
constexpr std::uint32_t transfers_per_segment_max = 64;
// The session collects the transfers of segments up to this size, and posts them in lists.
constexpr std::size_t small_segment_bytes = 32768;
// Number of segments to start before the session polls for completions again, because completions free buffers for more
// segments.
constexpr unsigned segments_per_round = 16;

} // namespace

bool Session::start_segments() {
    bool has_progress = false;
    for (unsigned started_count = 0;
         started_count < segments_per_round && !waiting_operations_.empty() && !is_rdma_broken_; ++started_count) {
        PendingOperation& pending = *waiting_operations_.front();
        // An operation whose segment has failed counts as fully started, so that no further segment starts.
        if (!pending.is_fully_started() && !begin_segment(pending)) {
            break;
        }
        has_progress = true;
        if (pending.is_fully_started()) {
            waiting_operations_.pop_front();
            if (pending.segments_in_progress == 0) {
                finish(pending);
            }
        }
    }
    return has_progress;
}

std::uint32_t Session::allocate_segment() {
    if (free_segments_.empty()) {
        auto segment = std::make_unique<Segment>();
        segment->index = static_cast<std::uint32_t>(segments_.size());
        segments_.push_back(std::move(segment));
        return segments_.back()->index;
    }
    const std::uint32_t index = free_segments_.back();
    free_segments_.pop_back();
    return index;
}

void Session::free_segment(Segment& segment) {
    staging_->release(segment.buffer);
    --segment.pending_operation->segments_in_progress;
    segment.pending_operation = nullptr;
    free_segments_.push_back(segment.index);
}

bool Session::begin_segment(PendingOperation& pending) {
    const Operation& operation = pending.operation;
    const auto length = static_cast<std::size_t>(
        std::min<std::uint64_t>(limits_.segment_bytes, operation.length - pending.started_bytes));
    const bool is_read = static_cast<Opcode>(operation.opcode) == Opcode::read;
    if (!queue_pairs_->has_space(operation.queue_pair, transfers_per_segment_max)) {
        return false;
    }
    // A read verifies whole chunks, so it needs space for one more chunk at each end.
    const verbs::Staging::Buffer buffer = staging_->take(is_read ? length + 2 * store_->chunk_bytes() : length);
    if (!buffer) {
        return false;
    }
    Segment& segment = *segments_[allocate_segment()];
    segment.pending_operation = &pending;
    segment.buffer = buffer;
    segment.begin = pending.started_bytes;
    segment.length = length;
    segment.buffer_offset = 0;
    segment.transfers_in_progress = 0;
    segment.has_failed = false;
    ++pending.segments_in_progress;
    if (is_read) {
        begin_read(segment);
    } else {
        pending.started_bytes += length;
        add_transfer(segment, 0, length);
    }
    if (segment.transfers_in_progress == 0) {
        // There is nothing to move: the range is a hole or after the end of the file, or the operation failed.
        free_segment(segment);
    }
    if (length > small_segment_bytes) {
        // A large segment is posted at once. During its transfer, the session reads the next segment from the file.
        is_rdma_broken_ |= !queue_pairs_->flush();
    }
    return true;
}

void Session::begin_read(Segment& segment) {
    PendingOperation& pending = *segment.pending_operation;
    const Operation& operation = pending.operation;
    const auto read_result =
        pending.file->inode->read(pending.file->fd.get(), operation.file_offset + segment.begin, segment.length,
                                  {segment.buffer.data, segment.buffer.size_bytes});
    if (read_result.bytes_or_error < 0) {
        pending.error = read_result.bytes_or_error;
        pending.is_cut_short = true;
        return;
    }
    const auto read_bytes = static_cast<std::size_t>(read_result.bytes_or_error);
    pending.is_cut_short = read_bytes < segment.length;
    segment.length = read_bytes;
    segment.buffer_offset = read_result.buffer_offset;
    pending.started_bytes += read_bytes;
    pending.moved_bytes += read_bytes;
    if ((operation.flags & checksum_wanted) != 0) {
        const std::uint32_t segment_checksum = crc32c(segment.buffer.data + segment.buffer_offset, read_bytes);
        pending.checksum =
            segment.begin == 0 ? segment_checksum : crc32c_combine(pending.checksum, segment_checksum, read_bytes);
    }
    if (read_bytes != 0 &&
        ((operation.flags & (forbid_holes | report_holes)) == 0 || add_transfers_between_holes(segment))) {
        add_transfer(segment, 0, read_bytes);
    }
}

// Adds one transfer for each range of data between holes, and records the holes. With forbid_holes, a hole fails the
// operation instead. Returns true if the segment has no hole. The caller must then add one transfer for the whole
// segment.
bool Session::add_transfers_between_holes(Segment& segment) {
    PendingOperation& pending = *segment.pending_operation;
    const int fd = pending.file->fd.get();
    const auto segment_file_begin = static_cast<off_t>(pending.operation.file_offset + segment.begin);
    const auto segment_file_end = segment_file_begin + static_cast<off_t>(segment.length);
    for (off_t file_position = segment_file_begin; file_position < segment_file_end;) {
        const off_t next_hole = lseek(fd, file_position, SEEK_HOLE);
        // A file system without SEEK_HOLE, or a file that shrank meanwhile, has no holes to report.
        const off_t data_end = next_hole < 0 || next_hole > segment_file_end ? segment_file_end : next_hole;
        if (data_end == segment_file_end && file_position == segment_file_begin) {
            return true;
        }
        if ((pending.operation.flags & forbid_holes) != 0) {
            pending.error = -ENODATA;
            pending.is_cut_short = true;
            return false;
        }
        const bool is_limit_reached =
            segment.transfers_in_progress + 1 >= transfers_per_segment_max || pending.holes.size() >= holes_max - 1;
        if (is_limit_reached) { // The rest of the segment is sent as one transfer, so its holes are sent as zeros.
            add_transfer(segment, static_cast<std::size_t>(file_position - segment_file_begin),
                         static_cast<std::size_t>(segment_file_end - file_position));
            return false;
        }
        if (data_end > file_position) {
            add_transfer(segment, static_cast<std::size_t>(file_position - segment_file_begin),
                         static_cast<std::size_t>(data_end - file_position));
        }
        if (data_end == segment_file_end) {
            return false;
        }
        const off_t next_data = lseek(fd, data_end, SEEK_DATA);
        const off_t hole_end = next_data < 0 || next_data > segment_file_end ? segment_file_end : next_data;
        const HoleExtent hole{segment.begin + static_cast<std::uint64_t>(data_end - segment_file_begin),
                              static_cast<std::uint64_t>(hole_end - data_end)};
        if (!pending.holes.empty() && pending.holes.back().offset + pending.holes.back().length == hole.offset) {
            pending.holes.back().length += hole.length;
        } else if (hole.length != 0) {
            pending.holes.push_back(hole);
        }
        file_position = hole_end;
    }
    return false;
}

void Session::add_transfer(Segment& segment, std::size_t offset_in_segment, std::size_t length) {
    const Operation& operation = segment.pending_operation->operation;
    const bool is_read = static_cast<Opcode>(operation.opcode) == Opcode::read;
    verbs::Transfer transfer{};
    transfer.direction = is_read ? verbs::Transfer::Direction::to_peer : verbs::Transfer::Direction::from_peer;
    transfer.length_bytes = static_cast<std::uint32_t>(length);
    transfer.local_address = segment.buffer.data + segment.buffer_offset + offset_in_segment;
    transfer.local_key = staging_->local_key(queue_pairs_->get_device_index(operation.queue_pair));
    transfer.remote_key = operation.rkey;
    transfer.remote_address = operation.remote_address + segment.begin + offset_in_segment;
    transfer.id = segment.index;
    ++segment.transfers_in_progress;
    queue_pairs_->add(operation.queue_pair, transfer);
}

bool Session::poll_completions() {
    return queue_pairs_->poll(
        [this](std::uint32_t segment_index, TransferStatus status) { complete_transfer(segment_index, status); });
}

void Session::complete_transfer(std::uint32_t segment_index, TransferStatus status) {
    Segment& segment = *segments_[segment_index];
    PendingOperation& pending = *segment.pending_operation;
    if (status != TransferStatus::succeeded) {
        // This failure ends the session. Only the operation whose transfer was refused gets a result. It gets the
        // result at once, because its queue pair is broken, so that no more of its bytes can arrive at the client. The
        // client fails the other operations when the connection ends.
        is_rdma_broken_ = segment.has_failed = true;
        if (status == TransferStatus::refused && !pending.is_finished) {
            has_refusal_ = true;
            pending.error = -EREMOTEIO;
            finish(pending);
        }
    }
    if (--segment.transfers_in_progress != 0 || segment.has_failed) {
        return;
    }
    if (static_cast<Opcode>(pending.operation.opcode) == Opcode::write) {
        finish_write(segment);
    }
    free_segment(segment);
    // If the operation is still the first in waiting_operations_, start_segments() removes and finishes it.
    if (pending.segments_in_progress == 0 && pending.is_fully_started() && !pending.is_finished &&
        (waiting_operations_.empty() || waiting_operations_.front() != &pending)) {
        finish(pending);
    }
}

void Session::finish_write(Segment& segment) {
    PendingOperation& pending = *segment.pending_operation;
    if (pending.error != 0) {
        return; // An earlier segment of the operation has failed.
    }
    const Operation& operation = pending.operation;
    const std::span<const std::byte> data(segment.buffer.data, segment.length);
    if ((operation.flags & (checksum_given | checksum_wanted)) != 0) {
        const std::uint32_t segment_checksum = crc32c(data.data(), data.size());
        if ((operation.flags & checksum_given) != 0 && segment_checksum != operation.checksum) {
            pending.error = -EBADMSG;
            return;
        }
        pending.checksum =
            segment.begin == 0 ? segment_checksum : crc32c_combine(pending.checksum, segment_checksum, data.size());
    }
    const std::int64_t write_result =
        pending.file->inode->write(pending.file->fd.get(), operation.file_offset + segment.begin, data);
    if (write_result < 0) {
        pending.error = write_result;
        pending.is_cut_short = true;
    } else {
        pending.moved_bytes += static_cast<std::uint64_t>(write_result);
    }
}

} // namespace gdrkit::storage
