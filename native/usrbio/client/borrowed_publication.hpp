// Permission to do I/O with memory that another process published. A process that opens or imports such memory needs
// it, because the agent lets the rings of a client use only memory that the client itself published or borrowed. With a
// daemon of 3FS instead of an agent, no permission is needed.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace gdrkit::usrbio {

class AgentConnection;

// The borrow ends with end() or the destructor, and also when the owner withdraws the publication. Afterwards
// operations in the memory fail with -EACCES. A forked child does not end the borrow of its parent.
class BorrowedPublication {
public:
    BorrowedPublication() noexcept = default;
    BorrowedPublication(const BorrowedPublication&) = delete;
    BorrowedPublication& operator=(const BorrowedPublication&) = delete;
    ~BorrowedPublication() { end(); }

    // Borrows the publication `name` with the link target `target`. Call it at most once. Returns 0: borrowed, or no
    // permission is needed; -ENOENT: no publication has that name; -EINVAL: the publication has another target;
    // -EACCES: the publication belongs to another user; -EREMOTEIO: the agent has ended; or another error of the agent.
    int begin(const char* mount, std::string_view name, std::string_view target) noexcept;
    // Returns the borrow to the agent, which first waits for the operations in flight.
    void end() noexcept;

private:
    std::shared_ptr<AgentConnection> agent_; // Null: nothing is borrowed.
    std::string name_;
};

} // namespace gdrkit::usrbio
