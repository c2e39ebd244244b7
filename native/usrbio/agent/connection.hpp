// The agent's end of a data connection to the storage server: sends operations and receives results, in frames of
// native/storage/frames.hpp. No function blocks.
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
    // Returns whether bytes of queued frames are still unsent.
    bool has_backlog() const noexcept { return sent_bytes_ < output_.size(); }

    // Packs the operations into frames and queues the frames for flush(). Returns the number of frames.
    std::size_t queue(std::span<const storage::Operation> operations);
    // Sends as many queued bytes as the socket accepts. Returns false if the connection has ended or failed.
    bool flush();
    // Passes each result of each complete frame to `handle_result`. Returns false if the connection has ended or
    // failed, if the server sent an invalid frame, or if `handle_result` returned false.
    bool receive(const std::function<bool(const storage::Result&)>& handle_result);

private:
    // Parses the complete frames of input_. Returns false if receive() has to return false.
    bool parse_frames(const std::function<bool(const storage::Result&)>& handle_result);
    bool parse_results(std::span<const std::byte> payload, std::uint32_t result_count,
                       const std::function<bool(const storage::Result&)>& handle_result);

    Descriptor socket_;
    std::uint64_t sequence_ = 0;    // Sequence number of the last queued frame.
    std::vector<std::byte> output_; // Queued frames.
    std::size_t sent_bytes_ = 0;    // Bytes of output_ that are sent.
    std::vector<std::byte> input_;  // Received bytes; [input_begin_, input_end_) is not parsed yet.
    std::size_t input_begin_ = 0;
    std::size_t input_end_ = 0;
};

} // namespace gdrkit::usrbio::agent
