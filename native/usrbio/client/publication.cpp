#include "usrbio/client/publication.hpp"

#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/library_mutex.hpp"
#include "usrbio/client/link.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/names.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>

namespace gdrkit::usrbio {

namespace {

// What is published over a connection lives as long as that does, so each publication keeps its own.
struct Held {
    std::map<std::pair<std::string, std::string>, std::shared_ptr<AgentConnection>> by_name; // Mount and name.
};

Held& held() {
    static auto* the = new Held;
    return *the;
}

void hold(const char* mount, std::string_view name, std::shared_ptr<AgentConnection> agent) {
    {
        const std::lock_guard lock(library_mutex());
        held().by_name[{mount, std::string(name)}].swap(agent);
    }
} // What was there before, of an agent that died, closes without the lock.

std::shared_ptr<AgentConnection> held_for(const char* mount, std::string_view name) {
    const std::lock_guard lock(library_mutex());
    const auto at = held().by_name.find({mount, std::string(name)});
    return at == held().by_name.end() ? nullptr : at->second;
}

void let_go(const char* mount, std::string_view name) {
    std::shared_ptr<AgentConnection> last; // Closes after the lock.
    const std::lock_guard lock(library_mutex());
    if (const auto at = held().by_name.find({mount, std::string(name)}); at != held().by_name.end()) {
        last = std::move(at->second);
        held().by_name.erase(at);
    }
}

// A daemon of 3FS drops what a process published when the process's descriptor of the folder is released, by exit or
// SIGKILL. So one is kept open for each mount, as long as this process has links there.
struct Folder {
    int fd = -1;
    std::set<std::string, std::less<>> links;
};

struct Folders {
    std::map<std::string, Folder, std::less<>> by_mount;
};

Folders& folders() {
    static auto* the = [] {
        auto* made = new Folders;
        in_forked_child([] { // A copy would keep the parent's publications alive.
            for (const auto& [mount, folder] : folders().by_mount) {
                if (folder.fd >= 0) {
                    close(folder.fd);
                }
            }
            folders().by_mount.clear();
        });
        return made;
    }();
    return *the;
}

void keep_folder_open(const char* mount, std::string_view name) {
    Folders& all = folders();
    const int fd = open(link_path(mount, "").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const std::lock_guard lock(library_mutex());
    Folder& folder = all.by_mount[mount];
    folder.links.emplace(name);
    if (folder.fd < 0) {
        folder.fd = fd;
    } else if (fd >= 0) {
        close(fd);
    }
}

void let_go_of_folder(const char* mount, std::string_view name) {
    Folders& all = folders();
    const std::lock_guard lock(library_mutex());
    const auto at = all.by_mount.find(mount);
    if (at == all.by_mount.end() || at->second.links.erase(std::string(name)) == 0 || !at->second.links.empty()) {
        return;
    }
    if (at->second.fd >= 0) {
        close(at->second.fd);
    }
    all.by_mount.erase(at);
}

bool has_link(const char* mount, std::string_view name) {
    const Folders& all = folders();
    const std::lock_guard lock(library_mutex());
    const auto at = all.by_mount.find(mount);
    return at != all.by_mount.end() && at->second.links.contains(name);
}

int publish_by_link(const char* mount, std::string_view name, std::string_view target) {
    if (const int error = make_link(std::string(target), link_path(mount, std::string(name))); error != 0) {
        return error;
    }
    keep_folder_open(mount, name);
    return 0;
}

int publish_over(AgentConnection& agent, std::string_view name, std::string_view target,
                 std::span<const std::byte> share_handle, std::span<const int> descriptors) {
    if (name.size() > UINT16_MAX || target.size() > UINT16_MAX || share_handle.size() > UINT16_MAX) {
        return -EINVAL;
    }
    AgentPublish request{.name_bytes = static_cast<std::uint16_t>(name.size()),
                         .target_bytes = static_cast<std::uint16_t>(target.size()),
                         .share_handle_bytes = static_cast<std::uint16_t>(share_handle.size()),
                         .reserved = 0};
    const iovec payload[] = {{&request, sizeof(request)},
                             {const_cast<char*>(name.data()), name.size()},
                             {const_cast<char*>(target.data()), target.size()},
                             {const_cast<std::byte*>(share_handle.data()), share_handle.size()}};
    return agent.call(AgentRequest::publish, payload, descriptors, {});
}

} // namespace

int publish(const char* mount, std::string_view name, std::string_view target, std::span<const std::byte> share_handle,
            std::span<const int> descriptors) noexcept {
    try {
        std::shared_ptr<AgentConnection> agent;
        int status = agent_connection(mount, agent);
        if (status == 0) {
            status = publish_over(*agent, name, target, share_handle, descriptors);
            if (status == 0) {
                hold(mount, name, std::move(agent));
            }
        } else if (status == -ENOENT) {
            status = publish_by_link(mount, name, target);
        }
        if (status != 0) {
            log_line(LogLevel::error, "%.*s was not published in %s: %s", static_cast<int>(name.size()), name.data(),
                     mount, std::strerror(-status));
        }
        return status;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

int unpublish(const char* mount, std::string_view name) noexcept {
    try {
        // Only over the connection of the publication, as long as it has an agent: another one does not know the name.
        std::shared_ptr<AgentConnection> agent = held_for(mount, name);
        int status = agent != nullptr && !agent->look_gone() ? 0 : agent_connection(mount, agent);
        if (status == 0) {
            auto length = static_cast<std::uint16_t>(name.size());
            const iovec payload[] = {{&length, sizeof(length)}, {const_cast<char*>(name.data()), name.size()}};
            status = agent->call(AgentRequest::unpublish, payload, {}, {});
            if (status == 0) {
                let_go(mount, name);
                let_go_of_folder(mount, name);
                return 0;
            }
            // An agent that does not answer may reach the memory still.
            if (status == -EREMOTEIO && !agent->look_gone()) {
                return -ETIMEDOUT;
            }
            // An agent that came after the link was made without one knows nothing of it.
            if (status == -ENOENT && !has_link(mount, name)) {
                return status;
            }
        }
        // Without an agent the link is this library's to remove; one that is gone may have left it behind.
        if (status != -ENOENT && status != -EREMOTEIO) {
            return status;
        }
        let_go(mount, name);
        const bool removed = unlink(link_path(mount, std::string(name)).c_str()) == 0;
        const int error = removed ? 0 : -errno;
        // A link that somebody else removed is gone too.
        if (removed || error == -ENOENT) {
            let_go_of_folder(mount, name);
        }
        return removed ? 0 : status == -EREMOTEIO ? -EREMOTEIO : error;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

} // namespace gdrkit::usrbio
