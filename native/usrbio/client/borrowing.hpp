// The right to do I/O with memory that another process published, as its opener or importer. An agent lets each client
// name its own memory alone, so it is asked; without an agent (a daemon of 3FS) nobody need be.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace gdrkit::usrbio {

class AgentConnection;

// Until end() or its destruction; or until the owner takes the publication back, unnoticed here: operations are -EACCES
// from then on. A forked child ends nothing of its parent's.
class Borrowing {
public:
    Borrowing() noexcept = default;
    Borrowing(const Borrowing&) = delete;
    Borrowing& operator=(const Borrowing&) = delete;
    ~Borrowing() { end(); }

    // 0: borrowed, or nobody needs to be asked. -ENOENT: nothing is published by that name; -EINVAL: something else is;
    // -EACCES: by another user; -EREMOTEIO: the agent is gone; or another verdict of its. Once.
    int begin(const char* mount, std::string_view name, std::string_view target) noexcept;
    // Waits for what is in flight.
    void end() noexcept;

private:
    std::shared_ptr<AgentConnection> agent_; // Null: nothing is borrowed.
    std::string name_;
};

} // namespace gdrkit::usrbio
