// Borrows a publication of another process, by a request to the agent, and returns it.
#include "usrbio/client/borrowed_publication.hpp"

#include "common/errno_text.hpp"
#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/log.hpp"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace gdrkit::usrbio {

int BorrowedPublication::borrow(const char* mount, std::string_view name, std::string_view link_target) noexcept {
    if (name.size() > UINT16_MAX || link_target.size() > UINT16_MAX) {
        return -EINVAL;
    }
    try {
        std::shared_ptr<AgentConnection> agent;
        int status = find_agent_connection(mount, agent);
        if (status == -ENOENT) { // The mount belongs to a daemon of 3FS, which requires no permission.
            return 0;
        }
        if (status == 0) {
            name_ = name;
            AgentPublish request{.name_bytes = static_cast<std::uint16_t>(name.size()),
                                 .target_bytes = static_cast<std::uint16_t>(link_target.size()),
                                 .share_handle_bytes = 0,
                                 .reserved = 0};
            const iovec payload[] = {{&request, sizeof(request)},
                                     {name_.data(), name_.size()},
                                     {const_cast<char*>(link_target.data()), link_target.size()}};
            status = agent->call(AgentRequest::borrow, payload, {}, {});
        }
        if (status == 0) {
            agent_ = std::move(agent);
        } else {
            log_line(LogLevel::error, "borrow %.*s of %s failed: %s", static_cast<int>(name.size()), name.data(), mount,
                     ErrnoText(-status).c_str());
        }
        return status;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

void BorrowedPublication::end_borrow() noexcept {
    const std::shared_ptr<AgentConnection> agent = std::exchange(agent_, nullptr);
    if (agent == nullptr) {
        return;
    }
    auto length = static_cast<std::uint16_t>(name_.size());
    const iovec payload[] = {{&length, sizeof(length)}, {name_.data(), name_.size()}};
    const int status = agent->call(AgentRequest::return_borrowed, payload, {}, {});
    // -ENOENT: the owner withdrew the publication before. -EREMOTEIO: the borrow ended with the agent or the
    // connection.
    if (status != 0 && status != -ENOENT && status != -EREMOTEIO) {
        log_line(LogLevel::error, "return of the borrowed publication %s failed: %s", name_.c_str(),
                 ErrnoText(-status).c_str());
    }
}

} // namespace gdrkit::usrbio
