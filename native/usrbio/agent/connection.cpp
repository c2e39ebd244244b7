// The agent's end of a data connection: sends frames of operations, and checks frames of results.
#include "usrbio/agent/connection.hpp"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "storage/crc32c.hpp"

namespace gdrkit::usrbio::agent {
namespace {

using storage::crc32c;

// Largest payload of a reply: one result for each operation of a full request. The agent never sets
// storage::report_holes, so no list of holes follows the results.
constexpr std::size_t reply_payload_bytes_max = storage::operations_max * sizeof(storage::Result);

constexpr std::size_t input_buffer_bytes = 1 << 18; // More than the largest reply.

} // namespace

Connection::Connection(Descriptor socket) : socket_(std::move(socket)), input_(input_buffer_bytes) {
    const int flags = fcntl(socket_.get(), F_GETFL);
    if (flags < 0 || fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) < 0)
        throw std::system_error(errno, std::generic_category(), "fcntl(O_NONBLOCK) failed");
}

std::size_t Connection::queue(std::span<const storage::Operation> operations) {
    std::size_t frame_count = 0;
    while (!operations.empty()) {
        const auto batch = operations.first(std::min<std::size_t>(operations.size(), storage::operations_max));
        operations = operations.subspan(batch.size());
        storage::FrameHeader header{};
        header.magic = storage::frame_magic;
        header.version = storage::frame_version;
        header.type = static_cast<std::uint16_t>(storage::FrameType::io_request);
        header.length = static_cast<std::uint32_t>(batch.size_bytes());
        header.count = static_cast<std::uint32_t>(batch.size());
        header.sequence = ++sequence_;
        header.payload_crc32c = crc32c(batch.data(), batch.size_bytes());
        header.header_crc32c = crc32c(&header, offsetof(storage::FrameHeader, header_crc32c));
        const auto* header_bytes = reinterpret_cast<const std::byte*>(&header);
        const auto* payload_bytes = reinterpret_cast<const std::byte*>(batch.data());
        output_.insert(output_.end(), header_bytes, header_bytes + sizeof header);
        output_.insert(output_.end(), payload_bytes, payload_bytes + batch.size_bytes());
        ++frame_count;
    }
    return frame_count;
}

bool Connection::flush() {
    while (has_backlog()) {
        const ssize_t byte_count = ::send(socket_.get(), output_.data() + sent_bytes_, output_.size() - sent_bytes_,
                                          MSG_NOSIGNAL | MSG_DONTWAIT);
        if (byte_count < 0) {
            if (errno == EINTR)
                continue;
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        sent_bytes_ += static_cast<std::size_t>(byte_count);
    }
    output_.clear();
    sent_bytes_ = 0;
    return true;
}

bool Connection::receive(const std::function<bool(const storage::Result&)>& handle_result) {
    for (;;) {
        if (input_begin_ == input_end_) {
            input_begin_ = input_end_ = 0;
        } else if (input_.size() - input_end_ < sizeof(storage::FrameHeader) + reply_payload_bytes_max) {
            // The largest reply may not fit behind the bytes that are not parsed yet, so move these bytes to the front.
            std::memmove(input_.data(), input_.data() + input_begin_, input_end_ - input_begin_);
            input_end_ -= input_begin_;
            input_begin_ = 0;
        }
        const std::size_t free_bytes = input_.size() - input_end_;
        const ssize_t byte_count = ::recv(socket_.get(), input_.data() + input_end_, free_bytes, MSG_DONTWAIT);
        if (byte_count < 0 && errno == EINTR)
            continue;
        if (byte_count < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK;
        if (byte_count == 0)
            return false;
        input_end_ += static_cast<std::size_t>(byte_count);
        if (!parse_frames(handle_result))
            return false;
        if (static_cast<std::size_t>(byte_count) < free_bytes)
            return true; // The socket is empty, or poll() will report the remaining bytes.
    }
}

bool Connection::parse_frames(const std::function<bool(const storage::Result&)>& handle_result) {
    while (input_end_ - input_begin_ >= sizeof(storage::FrameHeader)) {
        storage::FrameHeader header;
        std::memcpy(&header, input_.data() + input_begin_, sizeof header);
        if (header.magic != storage::frame_magic || header.version != storage::frame_version ||
            header.header_crc32c != crc32c(&header, offsetof(storage::FrameHeader, header_crc32c)))
            return false;
        // A reply to the agent has no list of holes, so its length follows from the number of results.
        if (header.type != static_cast<std::uint16_t>(storage::FrameType::io_reply) || header.count == 0 ||
            header.count > storage::operations_max || header.length != header.count * sizeof(storage::Result))
            return false;
        if (input_end_ - input_begin_ < sizeof header + header.length)
            return true;
        const std::span<const std::byte> payload(input_.data() + input_begin_ + sizeof header, header.length);
        if (header.payload_crc32c != crc32c(payload.data(), payload.size()))
            return false;
        input_begin_ += sizeof header + header.length;
        if (!parse_results(payload, header.count, handle_result))
            return false;
    }
    return true;
}

bool Connection::parse_results(std::span<const std::byte> payload, std::uint32_t result_count,
                               const std::function<bool(const storage::Result&)>& handle_result) {
    for (std::uint32_t index = 0; index < result_count; ++index) {
        storage::Result result;
        std::memcpy(&result, payload.data() + index * sizeof result, sizeof result);
        if (result.holes != 0 || !handle_result(result))
            return false;
    }
    return true;
}

} // namespace gdrkit::usrbio::agent
