// Permission to do I/O with memory that another process published. Rings of a client may use only memory that this
// client has published or borrowed. So a process that opens or imports memory of another process borrows the
// publication from the agent. A daemon of 3FS requires no permission.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace gdrkit::usrbio {

class AgentConnection;

// The borrow ends with end_borrow() or the destructor, and also when the owner withdraws the publication. Afterwards
// operations in the memory fail with -EACCES. A forked child does not end the borrow of its parent.
class BorrowedPublication {
public:
    BorrowedPublication() noexcept = default;
    BorrowedPublication(const BorrowedPublication&) = delete;
    BorrowedPublication& operator=(const BorrowedPublication&) = delete;
    ~BorrowedPublication() { end_borrow(); }

    // Borrows the publication `name` with the target `link_target`. Call it at most once. Returns 0 if the borrow
    // succeeded or no permission is needed, else -errno. -ENOENT: no publication has that name. -EINVAL: the
    // publication has another target. -EACCES: the publication belongs to another user. -EREMOTEIO: the agent has
    // ended.
    int borrow(const char* mount, std::string_view name, std::string_view link_target) noexcept;
    // Returns the borrow to the agent, which first waits for the operations in flight.
    void end_borrow() noexcept;

private:
    std::shared_ptr<AgentConnection> agent_; // Null: nothing is borrowed.
    std::string name_;
};

} // namespace gdrkit::usrbio
