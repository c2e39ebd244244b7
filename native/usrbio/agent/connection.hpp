// The agent's end of a data connection: sends frames and receives results, and never blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/descriptor.hpp"
#include "storage/frames.hpp"

namespace gdrkit::usrbio::agent {

class Connection {
public:
    // Throws std::system_error if the descriptor is not a socket or cannot be made non-blocking.
    explicit Connection(Descriptor socket);

    int fd() const noexcept { return socket_.get(); }
    bool has_backlog() const noexcept { return sent_ < output_.size(); }

    // Appends frames to the unsent bytes, and returns the number of frames.
    std::size_t queue(std::span<const storage::Operation> operations);
    // Sends as much as possible. Returns false if the connection has ended or failed.
    bool flush();
    // Passes each result of each complete frame to `handle`. Returns false if the connection has ended or failed, sent
    // an invalid frame, or `handle` returned false.
    bool receive(const std::function<bool(const storage::Result&)>& handle);

private:
    bool parse(const std::function<bool(const storage::Result&)>& handle);
    bool parse_results(std::span<const std::byte> payload, std::uint32_t count,
                       const std::function<bool(const storage::Result&)>& handle);

    Descriptor socket_;
    std::uint64_t sequence_ = 0;
    std::vector<std::byte> output_;
    std::size_t sent_ = 0;
    std::vector<std::byte> input_;
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
};

} // namespace gdrkit::usrbio::agent
