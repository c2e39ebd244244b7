// A mount in a temporary folder, and a minimal agent that serves it on threads of the test.
#include "test_mount.hpp"

#include "tests/check.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

namespace gdrkit::usrbio::test {

namespace fs = std::filesystem;

Mount::Mount() {
    char folder[] = "/tmp/usrbio-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    path_ = folder;
    fs::create_directories(path_ + "/3fs-virt/iovs");
    static constexpr const char* link_suffixes[] = {".ph", "", ".pl"}; // For the priorities high, normal and low.
    for (int priority = 0; priority < 3; ++priority) {
        semaphore_names_[priority] = "hf3fs-submit-ios." + to_string(make_random_uuid());
        semaphores_[priority] = sem_open(("/" + semaphore_names_[priority]).c_str(), O_CREAT | O_EXCL, 0600, 0);
        CHECK(semaphores_[priority] != SEM_FAILED);
        fs::create_symlink("/dev/shm/sem." + semaphore_names_[priority],
                           link_path(std::string("submit-ios") + link_suffixes[priority]));
    }
}

Mount::~Mount() {
    for (int priority = 0; priority < 3; ++priority) {
        sem_close(semaphores_[priority]);
        sem_unlink(("/" + semaphore_names_[priority]).c_str());
    }
    fs::remove_all(path_);
}

std::vector<std::string> Mount::link_names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(link_path(""))) {
        if (const std::string name = entry.path().filename(); !name.starts_with("submit-ios")) {
            names.push_back(name);
        }
    }
    return names;
}

Agent::Agent(Mount& mount, Rings rings)
    : mount_(mount), listener_fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string socket_path = mount.file_path("3fs-virt/agent.sock");
    CHECK(socket_path.size() < sizeof(address.sun_path));
    std::strcpy(address.sun_path, socket_path.c_str());
    unlink(socket_path.c_str());
    CHECK_EQUAL(bind(listener_fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    CHECK_EQUAL(listen(listener_fd_, 16), 0);
    accepting_thread_ = std::thread([this] { accept_clients(); });
    if (rings == Rings::served) {
        ring_thread_ = std::thread([this] { drain_rings(); });
    }
}

Agent::~Agent() {
    is_stopping_ = true;
    accepting_thread_.join();
    if (ring_thread_.joinable()) {
        ring_thread_.join();
    }
    for (Client& client : clients_) {
        shutdown(client.socket_fd, SHUT_RDWR);
        client.thread.join();
        close(client.socket_fd);
    }
    close(listener_fd_);
}

void Agent::accept_clients() {
    while (!is_stopping_) {
        pollfd listener_event{.fd = listener_fd_, .events = POLLIN, .revents = 0};
        if (poll(&listener_event, 1, 10) > 0) {
            const int fd = accept4(listener_fd_, nullptr, nullptr, SOCK_CLOEXEC);
            const std::lock_guard lock(mutex_);
            Client& client = clients_.emplace_back();
            client.socket_fd = fd;
            ++connection_count;
            client.thread = std::thread([this, &client] { serve(client); });
        }
    }
}

void Agent::serve(Client& client) {
    alignas(8) std::array<std::byte, agent_message_bytes_max> buffer;
    for (;;) {
        alignas(cmsghdr) char control_buffer[CMSG_SPACE(2 * sizeof(int))];
        iovec buffer_part{buffer.data(), buffer.size()};
        msghdr message{};
        message.msg_iov = &buffer_part;
        message.msg_iovlen = 1;
        message.msg_control = control_buffer;
        message.msg_controllen = sizeof(control_buffer);
        const ssize_t message_bytes = recvmsg(client.socket_fd, &message, MSG_CMSG_CLOEXEC);
        if (message_bytes <= 0) {
            break;
        }
        AgentHeader header;
        CHECK(message_bytes >= static_cast<ssize_t>(sizeof(header)));
        std::memcpy(&header, buffer.data(), sizeof(header));
        CHECK(header.magic == agent_magic && header.version == agent_version && header.status == 0);
        CHECK_EQUAL(header.length + sizeof(header), static_cast<std::size_t>(message_bytes));
        if (closes_at_unpublish && static_cast<AgentRequest>(header.type) == AgentRequest::unpublish) {
            break;
        }
        int received_fds[2] = {-1, -1};
        std::uint32_t fd_count = 0;
        if (const cmsghdr* rights = CMSG_FIRSTHDR(&message); rights != nullptr) {
            fd_count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            std::memcpy(received_fds, CMSG_DATA(rights), fd_count * sizeof(int));
        }
        CHECK_EQUAL(header.descriptors, fd_count);
        std::uint64_t reply_value = 0;
        header.status = handle_request(client, header, buffer.data() + sizeof(header), received_fds, reply_value);
        for (const int fd : received_fds) {
            if (fd >= 0) {
                close(fd);
            }
        }
        const std::string refusal_reason = "refused by the test";
        std::vector<std::byte> reply(sizeof(header));
        const auto request_type = static_cast<AgentRequest>(header.type);
        const bool has_reply_value =
            request_type == AgentRequest::register_file || request_type == AgentRequest::unpublish_and_keep;
        header.length = static_cast<std::uint32_t>(header.status != 0                    ? refusal_reason.size()
                                                   : request_type == AgentRequest::hello ? sizeof(AgentHello)
                                                   : has_reply_value                     ? sizeof(reply_value)
                                                                                         : 0);
        header.descriptors = 0;
        header.sequence += corrupts_replies ? 1 : 0;
        reply.resize(sizeof(header) + header.length);
        std::memcpy(reply.data(), &header, sizeof(header));
        if (header.status != 0) {
            std::memcpy(reply.data() + sizeof(header), refusal_reason.data(), refusal_reason.size());
        } else if (has_reply_value || request_type == AgentRequest::hello) {
            // For hello, the value is AgentHello::features.
            std::memcpy(reply.data() + sizeof(header), &reply_value, sizeof(reply_value));
        }
        if (send(client.socket_fd, reply.data(), reply.size(), MSG_NOSIGNAL) < 0) {
            break;
        }
    }
    const std::lock_guard lock(mutex_);
    while (!client.published_buffers.empty()) {
        // Remove memory that is still published, because the client did not clean up or this agent ended the
        // connection.
        std::error_code remove_error;
        fs::remove(client.published_buffers.begin()->second->shm_path, remove_error);
        unpublish(client, client.published_buffers.begin()->first);
    }
    borrow_count -= static_cast<int>(client.borrow_counts.size());
    client.borrow_counts.clear();
    registered_file_count -= static_cast<int>(client.file_fds.size());
    for (const auto& [inode, fd] : client.file_fds) {
        close(fd);
    }
    client.file_fds.clear();
    shutdown(client.socket_fd, SHUT_RDWR); // The destructor closes the descriptor after it has joined this thread.
    --connection_count;
}

int Agent::handle_request(Client& client, const AgentHeader& header, const std::byte* payload, const int* fds,
                          std::uint64_t& reply_value) {
    const std::lock_guard lock(mutex_);
    // The payload of several requests is a name: u16 length, then the characters.
    std::uint16_t name_bytes = 0;
    std::memcpy(&name_bytes, payload, header.length >= 2 ? 2 : 0);
    const std::string name(reinterpret_cast<const char*>(payload + 2),
                           header.length >= 2u + name_bytes ? name_bytes : 0);
    switch (static_cast<AgentRequest>(header.type)) {
    case AgentRequest::hello:
        reply_value = keeps_registrations ? agent_feature_keep : 0;
        return header.length == sizeof(AgentHello) ? 0 : EINVAL;
    case AgentRequest::publish:
        if (refuses_publish_while_kept && kept_registration_count > 0) {
            return EDQUOT;
        }
        return refusal_errno != 0 ? refusal_errno.load() : publish(client, payload, header.length, fds[0]);
    case AgentRequest::unpublish:
        if (!client.published_buffers.contains(name)) {
            return ENOENT;
        }
        unpublish(client, name);
        return 0;
    case AgentRequest::register_file: {
        struct stat attributes {};
        CHECK_EQUAL(fstat(fds[0], &attributes), 0);
        if (refusal_errno != 0) {
            return refusal_errno;
        }
        reply_value = attributes.st_ino;
        if (client.file_registration_counts[attributes.st_ino]++ == 0) {
            client.file_fds[attributes.st_ino] = dup(fds[0]);
            ++registered_file_count;
        }
        return 0;
    }
    case AgentRequest::deregister_file: {
        std::uint64_t inode = 0;
        std::memcpy(&inode, payload, sizeof(inode));
        const auto file_entry = client.file_fds.find(inode);
        if (file_entry == client.file_fds.end()) {
            return ENOENT;
        }
        if (--client.file_registration_counts[inode] != 0) {
            return 0;
        }
        client.file_registration_counts.erase(inode);
        close(file_entry->second);
        client.file_fds.erase(file_entry);
        --registered_file_count;
        return 0;
    }
    case AgentRequest::punch_hole: {
        // The payload: u64 flags, u32 count, u32 0, count x (u64 begin, u64 end).
        std::uint32_t range_count = 0;
        std::memcpy(&range_count, payload + 8, sizeof(range_count));
        CHECK_EQUAL(header.length, 16 + 16 * range_count);
        for (std::uint32_t i = 0; i < range_count; ++i) {
            std::uint64_t begin_and_end[2];
            std::memcpy(begin_and_end, payload + 16 + 16 * i, sizeof(begin_and_end));
            if (begin_and_end[0] != begin_and_end[1] &&
                fallocate(fds[0], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin_and_end[0]),
                          static_cast<off_t>(begin_and_end[1] - begin_and_end[0])) != 0) {
                return errno;
            }
        }
        return 0;
    }
    case AgentRequest::hard_link: {
        // fds[0] is the file, fds[1] the folder of the new link, and `name` the name of the new link.
        const std::string source_path = "/proc/self/fd/" + std::to_string(fds[0]);
        return linkat(AT_FDCWD, source_path.c_str(), fds[1], name.c_str(), AT_SYMLINK_FOLLOW) == 0 ? 0 : errno;
    }
    case AgentRequest::borrow:
        return refusal_errno != 0 ? refusal_errno.load() : borrow(client, payload);
    case AgentRequest::return_borrowed:
        return return_borrowed(client, name);
    case AgentRequest::unpublish_and_keep:
        CHECK(keeps_registrations);
        if (!client.published_buffers.contains(name)) {
            return ENOENT;
        }
        unpublish(client, name);
        reply_value = 1; // The agent keeps the registration.
        ++kept_registration_count;
        return 0;
    case AgentRequest::drop_kept:
        CHECK(keeps_registrations && fds[0] >= 0);
        if (refuses_publish_while_kept) {
            usleep(5000);
        }
        --kept_registration_count;
        return 0;
    }
    return ENOSYS;
}

int Agent::publish(Client& client, const std::byte* payload, std::size_t length, int unnamed_fd) {
    AgentPublish request;
    CHECK(length >= sizeof(request));
    std::memcpy(&request, payload, sizeof(request));
    const auto* name_and_target = reinterpret_cast<const char*>(payload + sizeof(request));
    const std::string name(name_and_target, request.name_bytes);
    const std::string target(name_and_target + request.name_bytes, request.target_bytes);
    CHECK(target.starts_with("/dev/shm/hf3fs-iov-"));
    if (unnamed_fd >= 0) {
        const std::string descriptor_path = "/proc/self/fd/" + std::to_string(unnamed_fd);
        CHECK_EQUAL(linkat(AT_FDCWD, descriptor_path.c_str(), AT_FDCWD, target.c_str(), AT_SYMLINK_FOLLOW), 0);
    }
    auto buffer = std::make_unique<Buffer>();
    buffer->shm_path = target;
    // The file may be missing, because a client removes the file when it detects the end of this agent.
    std::error_code size_error;
    buffer->size_bytes = fs::file_size(target, size_error);
    if (size_error) {
        return size_error.value();
    }
    constexpr std::size_t shm_folder_length = sizeof("/dev/shm") - 1;
    if (const int status = buffer->memory.open(target.substr(shm_folder_length), buffer->size_bytes, -1); status != 0) {
        return -status;
    }
    // After the UUID (36 characters), the name of a ring has ".r" or ".w" with its depth and ".t" with its timeout in
    // ms (see make_link_name()). Other names have no "r" or "w" there.
    const std::size_t direction_position = name.find_first_of("rw", 36);
    if (direction_position != std::string::npos) {
        const std::size_t timeout_position = name.find(".t", direction_position);
        CHECK(timeout_position != std::string::npos);
        std::unique_ptr<AgentRing> ring;
        if (const int status = AgentRing::attach(buffer->memory.base(), buffer->size_bytes,
                                                 std::atoi(name.c_str() + direction_position + 1),
                                                 std::atoll(name.c_str() + timeout_position + 2) * 1000000, ring);
            status != 0) {
            return -status;
        }
        client.rings[name] = std::move(ring);
    }
    std::error_code link_error; // If the link does not exist, read_symlink() sets this and returns an empty path.
    if (fs::read_symlink(mount_.link_path(name), link_error) != target) {
        fs::create_symlink(target, mount_.link_path(name));
    }
    client.published_buffers[name] = std::move(buffer);
    ++publication_count;
    return 0;
}

// Takes the name by value, because a reference to the key of the erased entry would become invalid.
void Agent::unpublish(Client& client, std::string name) {
    client.rings.erase(name);
    client.published_buffers.erase(name);
    fs::remove(mount_.link_path(name));
    --publication_count;
    for (Client& other_client : clients_) {
        borrow_count -= static_cast<int>(other_client.borrow_counts.erase(name));
    }
}

int Agent::borrow(Client& client, const std::byte* payload) {
    AgentPublish request;
    std::memcpy(&request, payload, sizeof(request));
    CHECK_EQUAL(int{request.share_handle_bytes}, 0);
    const auto* name_and_target = reinterpret_cast<const char*>(payload + sizeof(request));
    const std::string name(name_and_target, request.name_bytes);
    const auto has_publication = [&](const Client& other_client) {
        return other_client.published_buffers.contains(name);
    };
    if (std::none_of(clients_.begin(), clients_.end(), has_publication)) {
        return ENOENT;
    }
    if (fs::read_symlink(mount_.link_path(name)) !=
        std::string(name_and_target + request.name_bytes, request.target_bytes)) {
        return EINVAL;
    }
    borrow_count += ++client.borrow_counts[name] == 1;
    return 0;
}

int Agent::return_borrowed(Client& client, const std::string& name) {
    const auto entry = client.borrow_counts.find(name);
    if (entry == client.borrow_counts.end()) {
        return ENOENT;
    }
    if (--entry->second == 0) {
        client.borrow_counts.erase(entry);
        --borrow_count;
    }
    return 0;
}

// Returns the buffer with this id that the client has published or borrowed, or null.
const Agent::Buffer* Agent::find_buffer(const Client& client, const std::string& uuid_text) {
    for (const auto& [name, buffer] : client.published_buffers) {
        if (name.starts_with(uuid_text)) {
            return buffer.get();
        }
    }
    for (const auto& [name, name_borrow_count] : client.borrow_counts) {
        for (const Client& other_client : clients_) {
            if (const auto entry = other_client.published_buffers.find(name);
                name.starts_with(uuid_text) && entry != other_client.published_buffers.end()) {
                return entry->second.get();
            }
        }
    }
    return nullptr;
}

std::int64_t Agent::execute(Client& client, const Arguments& arguments, bool is_read) {
    Uuid buffer_id;
    std::memcpy(buffer_id.data(), arguments.buffer_id, buffer_id.size());
    const auto file_entry = client.file_fds.find(arguments.file_inode);
    if (file_entry == client.file_fds.end()) {
        return -EBADF;
    }
    const Buffer* const buffer = find_buffer(client, to_string(buffer_id));
    if (buffer == nullptr) {
        return -EACCES;
    }
    if (arguments.buffer_offset > buffer->size_bytes ||
        arguments.length > buffer->size_bytes - arguments.buffer_offset) {
        return -EINVAL;
    }
    void* memory = buffer->memory.base() + arguments.buffer_offset;
    const auto offset = static_cast<off_t>(arguments.file_offset);
    const ssize_t byte_count = is_read ? pread(file_entry->second, memory, arguments.length, offset)
                                       : pwrite(file_entry->second, memory, arguments.length, offset);
    return byte_count < 0 ? -errno : byte_count;
}

std::size_t Agent::drain_ring(Client& client, AgentRing& ring, bool is_read) {
    if (is_paused_) {
        return 0;
    }
    std::array<ClaimedOperation, 32> claimed;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const std::size_t claimed_count =
        ring.claim(claimed, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    for (std::size_t i = 0; i < claimed_count; ++i) {
        CHECK(ring.complete(claimed[i].position, execute(client, claimed[i].arguments, is_read)));
    }
    ring.flush();
    return claimed_count;
}

void Agent::set_rings_paused(bool is_paused) {
    const std::lock_guard lock(mutex_);
    is_paused_ = is_paused;
}

void Agent::drain_rings() {
    while (!is_stopping_) {
        std::size_t executed_count = 0;
        bool have_all_announced_sleep = true;
        {
            const std::lock_guard lock(mutex_);
            for (Client& client : clients_) {
                for (auto& [name, ring] : client.rings) {
                    // After the UUID of 36 characters, the name of a ring for reads contains ".r".
                    executed_count += drain_ring(client, *ring, name.find(".r", 36) != std::string::npos);
                }
            }
            if (executed_count == 0) {
                for (Client& client : clients_) {
                    for (auto& [name, ring] : client.rings) {
                        have_all_announced_sleep = ring->prepare_to_sleep() && have_all_announced_sleep;
                    }
                }
            }
        }
        if (executed_count == 0) {
            // Sleep on the submit semaphore of normal priority: 2 ms if each ring announced the sleep, else 20 us. A
            // post for a ring with another priority does not end the sleep. Then reset the semaphore.
            timespec deadline{};
            clock_gettime(CLOCK_REALTIME, &deadline);
            deadline.tv_nsec += have_all_announced_sleep ? 2000000 : 20000;
            deadline.tv_sec += deadline.tv_nsec / 1000000000;
            deadline.tv_nsec %= 1000000000;
            sem_timedwait(mount_.submit_semaphore(1), &deadline);
            while (sem_trywait(mount_.submit_semaphore(1)) == 0) {
            }
            const std::lock_guard lock(mutex_);
            for (Client& client : clients_) {
                for (auto& [name, ring] : client.rings) {
                    ring->end_sleep();
                }
            }
        }
    }
}

} // namespace gdrkit::usrbio::test
