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

// Largest payload of a reply: results of as many operations as a frame may have. The agent requests no holes, so a
// result has none.
constexpr std::size_t reply_bytes_max = storage::operations_max * sizeof(storage::Result);

} // namespace

Connection::Connection(Descriptor socket) : socket_(std::move(socket)), input_(1 << 18) {
    const int flags = fcntl(socket_.get(), F_GETFL);
    if (flags < 0 || fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) < 0)
        throw std::system_error(errno, std::generic_category(), "fcntl failed");
}

std::size_t Connection::queue(std::span<const storage::Operation> operations) {
    std::size_t frames = 0;
    while (!operations.empty()) {
        const auto part = operations.first(std::min<std::size_t>(operations.size(), storage::operations_max));
        operations = operations.subspan(part.size());
        storage::FrameHeader header{};
        header.magic = storage::frame_magic;
        header.version = storage::frame_version;
        header.type = static_cast<std::uint16_t>(storage::FrameType::io_request);
        header.length = static_cast<std::uint32_t>(part.size_bytes());
        header.count = static_cast<std::uint32_t>(part.size());
        header.sequence = ++sequence_;
        header.payload_crc32c = crc32c(part.data(), part.size_bytes());
        header.header_crc32c = crc32c(&header, offsetof(storage::FrameHeader, header_crc32c));
        const auto* head = reinterpret_cast<const std::byte*>(&header);
        const auto* body = reinterpret_cast<const std::byte*>(part.data());
        output_.insert(output_.end(), head, head + sizeof header);
        output_.insert(output_.end(), body, body + part.size_bytes());
        ++frames;
    }
    return frames;
}

bool Connection::flush() {
    while (has_backlog()) {
        const ssize_t sent =
            ::send(socket_.get(), output_.data() + sent_, output_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR)
                continue;
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        sent_ += static_cast<std::size_t>(sent);
    }
    output_.clear();
    sent_ = 0;
    return true;
}

bool Connection::receive(const std::function<bool(const storage::Result&)>& handle) {
    for (;;) {
        if (begin_ == end_) {
            begin_ = end_ = 0;
        } else if (input_.size() - end_ < sizeof(storage::FrameHeader) + reply_bytes_max) {
            std::memmove(input_.data(), input_.data() + begin_, end_ - begin_);
            end_ -= begin_;
            begin_ = 0;
        }
        const std::size_t space = input_.size() - end_;
        const ssize_t received = ::recv(socket_.get(), input_.data() + end_, space, MSG_DONTWAIT);
        if (received < 0 && errno == EINTR)
            continue;
        if (received < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK;
        if (received == 0)
            return false;
        end_ += static_cast<std::size_t>(received);
        if (!parse(handle))
            return false;
        if (static_cast<std::size_t>(received) < space)
            return true; // The socket is empty, or poll() will report the rest.
    }
}

bool Connection::parse(const std::function<bool(const storage::Result&)>& handle) {
    while (end_ - begin_ >= sizeof(storage::FrameHeader)) {
        storage::FrameHeader header;
        std::memcpy(&header, input_.data() + begin_, sizeof header);
        if (header.magic != storage::frame_magic || header.version != storage::frame_version ||
            header.header_crc32c != crc32c(&header, offsetof(storage::FrameHeader, header_crc32c)))
            return false;
        // The agent requested no holes, so only one length is valid.
        if (header.type != static_cast<std::uint16_t>(storage::FrameType::io_reply) || header.count == 0 ||
            header.count > storage::operations_max || header.length != header.count * sizeof(storage::Result))
            return false;
        if (end_ - begin_ < sizeof header + header.length)
            return true;
        const std::span<const std::byte> payload(input_.data() + begin_ + sizeof header, header.length);
        if (header.payload_crc32c != crc32c(payload.data(), payload.size()))
            return false;
        begin_ += sizeof header + header.length;
        if (!parse_results(payload, header.count, handle))
            return false;
    }
    return true;
}

bool Connection::parse_results(std::span<const std::byte> payload, std::uint32_t count,
                               const std::function<bool(const storage::Result&)>& handle) {
    for (std::uint32_t index = 0; index < count; ++index) {
        storage::Result result;
        std::memcpy(&result, payload.data() + index * sizeof result, sizeof result);
        if (result.holes != 0 || !handle(result))
            return false;
    }
    return true;
}

} // namespace gdrkit::usrbio::agent
