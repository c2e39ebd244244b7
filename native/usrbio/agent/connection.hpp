// The agent's end of a data connection: frames out, results in, both without ever blocking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "storage/descriptor.hpp"
#include "storage/frames.hpp"

namespace gdrkit::usrbio::agent {

using storage::Descriptor;

class Connection {
public:
    // Throws std::system_error when the descriptor is no socket that can be made non-blocking.
    explicit Connection(Descriptor socket);

    int fd() const noexcept { return socket_.get(); }
    bool has_backlog() const noexcept { return sent_ < output_.size(); }

    // Writes frames behind what is still to be sent; gives their number.
    std::size_t queue(std::span<const storage::Operation> operations);
    // Both: false when the connection is over, by its end, an error or something that is no frame.
    bool flush();
    // `handle` gets every result of every whole frame that has come; false from it ends the connection too.
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
