// Permission to do I/O with memory that another process published, for the process that opened or imported it. An agent
// lets the rings of a client use only its own memory, unless the client borrows other memory. Without an agent (with a
// daemon of 3FS) no permission is needed.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace gdrkit::usrbio {

class AgentConnection;

// It ends with end() or the destructor, and also when the owner withdraws the publication; operations then fail with
// -EACCES. A forked child does not end the borrow of its parent.
class BorrowedPublication {
public:
    BorrowedPublication() noexcept = default;
    BorrowedPublication(const BorrowedPublication&) = delete;
    BorrowedPublication& operator=(const BorrowedPublication&) = delete;
    ~BorrowedPublication() { end(); }

    // Call it at most once. Returns 0: borrowed, or no permission is needed. -ENOENT: no publication has that name;
    // -EINVAL: its target differs; -EACCES: it belongs to another user; -EREMOTEIO: the agent has ended; or another
    // error of the agent.
    int begin(const char* mount, std::string_view name, std::string_view target) noexcept;
    // Waits for the operations in flight.
    void end() noexcept;

private:
    std::shared_ptr<AgentConnection> agent_; // Null: nothing is borrowed.
    std::string name_;
};

} // namespace gdrkit::usrbio
