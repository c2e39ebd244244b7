// Publishes memory and rings through the agent, or without an agent by a symbolic link alone, and withdraws them.
#include "usrbio/client/publication.hpp"

#include "common/errno_text.hpp"
#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/library_mutex.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/names.hpp"
#include "usrbio/client/shared_memory.hpp"

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

// The table of the connections over which this process published its names. The agent withdraws a publication when the
// connection closes, so this table keeps the connections open.
struct PublicationConnections {
    // The key is the pair of mount and name.
    std::map<std::pair<std::string, std::string>, std::shared_ptr<AgentConnection>> by_name;
};

PublicationConnections& publication_connections() {
    static auto* table = new PublicationConnections;
    return *table;
}

// Creates the symbolic link of a publication in a mount without an agent. Returns 0 or the -errno of symlink(2);
// -EEXIST: the link belongs to another publication.
int make_link(const std::string& target, const std::string& path) noexcept {
    return symlink(target.c_str(), path.c_str()) == 0 ? 0 : -errno;
}

void store_connection(const char* mount, std::string_view name, std::shared_ptr<AgentConnection> agent) {
    {
        const std::lock_guard lock(library_mutex());
        publication_connections().by_name[{mount, std::string(name)}].swap(agent);
    }
} // After swap(), `agent` is null or the connection to a previous agent that died. It closes here, after the unlock.

std::shared_ptr<AgentConnection> find_connection(const char* mount, std::string_view name) {
    const std::lock_guard lock(library_mutex());
    const auto entry = publication_connections().by_name.find({mount, std::string(name)});
    return entry == publication_connections().by_name.end() ? nullptr : entry->second;
}

void drop_connection(const char* mount, std::string_view name) {
    // Declared before the lock, so that the connection closes after the unlock.
    std::shared_ptr<AgentConnection> removed_connection;
    const std::lock_guard lock(library_mutex());
    if (const auto entry = publication_connections().by_name.find({mount, std::string(name)});
        entry != publication_connections().by_name.end()) {
        removed_connection = std::move(entry->second);
        publication_connections().by_name.erase(entry);
    }
}

// The folder of the links in one mount, and the links that this process made there. The descriptor of the folder stays
// open while there are links, because a daemon of 3FS removes the publications of a process when the process closes
// this descriptor or ends.
struct LinkFolder {
    int fd = -1;
    std::set<std::string, std::less<>> link_names;
};

struct LinkFolders {
    std::map<std::string, LinkFolder, std::less<>> by_mount;
};

LinkFolders& link_folders() {
    static auto* table = [] {
        auto* new_table = new LinkFolders;
        add_fork_handler([] { // The child's copies of the descriptors would keep the parent's publications alive.
            for (const auto& [mount, folder] : link_folders().by_mount) {
                if (folder.fd >= 0) {
                    close(folder.fd);
                }
            }
            link_folders().by_mount.clear();
        });
        return new_table;
    }();
    return *table;
}

// Records a link that this process made, and keeps the folder of the links open.
void record_link(const char* mount, std::string_view name) {
    LinkFolders& table = link_folders();
    const int fd = open(make_link_path(mount, "").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const std::lock_guard lock(library_mutex());
    LinkFolder& folder = table.by_mount[mount];
    folder.link_names.emplace(name);
    if (folder.fd < 0) {
        folder.fd = fd;
    } else if (fd >= 0) {
        close(fd);
    }
}

// Ends the effect of record_link(). Closes the folder after its last link.
void forget_link(const char* mount, std::string_view name) {
    LinkFolders& table = link_folders();
    const std::lock_guard lock(library_mutex());
    const auto entry = table.by_mount.find(mount);
    if (entry == table.by_mount.end() || entry->second.link_names.erase(std::string(name)) == 0 ||
        !entry->second.link_names.empty()) {
        return;
    }
    if (entry->second.fd >= 0) {
        close(entry->second.fd);
    }
    table.by_mount.erase(entry);
}

// Returns whether this process made the link.
bool has_link(const char* mount, std::string_view name) {
    const LinkFolders& table = link_folders();
    const std::lock_guard lock(library_mutex());
    const auto entry = table.by_mount.find(mount);
    return entry != table.by_mount.end() && entry->second.link_names.contains(name);
}

int publish_by_link(const char* mount, std::string_view name, std::string_view target) {
    if (const int error = make_link(std::string(target), make_link_path(mount, std::string(name))); error != 0) {
        return error;
    }
    record_link(mount, name);
    return 0;
}

int publish_to_agent(AgentConnection& agent, std::string_view name, std::string_view target,
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

// Sends the request that withdraws a publication. If `keeping_agent` is not null, asks the agent to keep the memory
// registered. If the agent does so, sets `*keeping_agent` to `agent`.
int withdraw_from_agent(const std::shared_ptr<AgentConnection>& agent, std::string_view name,
                        std::shared_ptr<AgentConnection>* keeping_agent) {
    auto name_bytes = static_cast<std::uint16_t>(name.size());
    const iovec payload[] = {{&name_bytes, sizeof(name_bytes)}, {const_cast<char*>(name.data()), name.size()}};
    if (keeping_agent == nullptr || !agent->keeps_registrations()) {
        return agent->call(AgentRequest::unpublish, payload, {}, {});
    }
    std::uint64_t is_kept = 0;
    const int status =
        agent->call(AgentRequest::unpublish_and_keep, payload, {}, std::as_writable_bytes(std::span(&is_kept, 1)));
    if (status == 0 && is_kept == 1) {
        *keeping_agent = agent;
    }
    return status;
}

// Implements unpublish() and unpublish_and_keep(): the agent withdraws the publication or, if there is no agent, this
// function removes the link.
int withdraw_publication(const char* mount, std::string_view name,
                         std::shared_ptr<AgentConnection>* keeping_agent) noexcept {
    try {
        // Use the connection over which the name was published, unless its agent has ended. Another agent does not know
        // the name.
        std::shared_ptr<AgentConnection> agent = find_connection(mount, name);
        int status = agent != nullptr && !agent->check_closed_by_agent() ? 0 : find_agent_connection(mount, agent);
        if (status == 0) {
            status = withdraw_from_agent(agent, name, keeping_agent);
            if (status == 0) {
                const bool is_kept = keeping_agent != nullptr && *keeping_agent != nullptr;
                log_line(LogLevel::info, "withdrew %.*s from the agent of %s%s", static_cast<int>(name.size()),
                         name.data(), mount, is_kept ? ", which keeps the registration" : "");
                drop_connection(mount, name);
                forget_link(mount, name);
                return 0;
            }
            // An agent that does not reply but has not ended may still access the memory.
            if (status == -EREMOTEIO && !agent->check_closed_by_agent()) {
                return -ETIMEDOUT;
            }
            // -ENOENT: the agent does not know the name. If this process did not make the link itself, nothing is left
            // to withdraw. If this process made the link (before the agent was started), it removes the link below.
            if (status == -ENOENT && !has_link(mount, name)) {
                drop_connection(mount, name); // The agent has ended the publication, because its link was removed.
                return status;
            }
        }
        // If there is no agent, this library removes the link. If the agent was killed, its links still exist, so the
        // library removes the link too.
        if (status != -ENOENT && status != -EREMOTEIO) {
            return status;
        }
        drop_connection(mount, name);
        const bool is_removed = unlink(make_link_path(mount, std::string(name)).c_str()) == 0;
        const int error = is_removed ? 0 : -errno;
        if (is_removed) {
            log_line(LogLevel::info, "removed the link %.*s from %s", static_cast<int>(name.size()), name.data(),
                     mount);
        }
        // -ENOENT: another process has removed the link.
        if (is_removed || error == -ENOENT) {
            forget_link(mount, name);
        }
        return is_removed ? 0 : status == -EREMOTEIO ? -EREMOTEIO : error;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

// Implements publish() and publish_unnamed(). `unnamed_memory`: memory that still needs its name in /dev/shm
// (publish_unnamed), or null (publish).
int publish_memory(const char* mount, std::string_view name, std::string_view target,
                   std::span<const std::byte> share_handle, std::span<const int> descriptors,
                   SharedMemory* unnamed_memory) noexcept {
    try {
        std::shared_ptr<AgentConnection> agent;
        int status = find_agent_connection(mount, agent);
        if (status == 0) {
            status = publish_to_agent(*agent, name, target, share_handle, descriptors);
            if (unnamed_memory != nullptr) {
                unnamed_memory->adopt_name(); // Also after an error: the agent may have died after it created the name.
            }
            if (status == 0) {
                log_line(LogLevel::info, "published %.*s to the agent of %s, with %zu descriptor%s",
                         static_cast<int>(name.size()), name.data(), mount, descriptors.size(),
                         descriptors.size() == 1 ? "" : "s");
                store_connection(mount, name, std::move(agent));
            }
        } else if (status == -ENOENT) {
            status = unnamed_memory == nullptr ? 0 : unnamed_memory->create_name();
            if (status == 0) {
                status = publish_by_link(mount, name, target);
            }
            if (status == 0) {
                log_line(LogLevel::info, "published %.*s by a link only: %s has no agent",
                         static_cast<int>(name.size()), name.data(), mount);
            }
        }
        if (status != 0) {
            log_line(LogLevel::error, "publish %.*s in %s failed: %s", static_cast<int>(name.size()), name.data(),
                     mount, ErrnoText(-status).c_str());
        }
        return status;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

} // namespace

int publish(const char* mount, std::string_view name, std::string_view target, std::span<const std::byte> share_handle,
            std::span<const int> descriptors) noexcept {
    return publish_memory(mount, name, target, share_handle, descriptors, nullptr);
}

int publish_unnamed(const char* mount, std::string_view name, std::string_view target, SharedMemory& memory) noexcept {
    const int fd = memory.unnamed_fd();
    return publish_memory(mount, name, target, {}, {&fd, 1}, &memory);
}

int unpublish(const char* mount, std::string_view name) noexcept {
    return withdraw_publication(mount, name, nullptr);
}

int unpublish_and_keep(const char* mount, std::string_view name,
                       std::shared_ptr<AgentConnection>* keeping_agent) noexcept {
    keeping_agent->reset();
    return withdraw_publication(mount, name, keeping_agent);
}

} // namespace gdrkit::usrbio
