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
    static constexpr const char* suffixes[] = {".ph", "", ".pl"};
    for (int i = 0; i < 3; ++i) {
        semaphore_names_[i] = "hf3fs-submit-ios." + to_string(make_random_uuid());
        semaphores_[i] = sem_open(("/" + semaphore_names_[i]).c_str(), O_CREAT | O_EXCL, 0600, 0);
        CHECK(semaphores_[i] != SEM_FAILED);
        fs::create_symlink("/dev/shm/sem." + semaphore_names_[i], link(std::string("submit-ios") + suffixes[i]));
    }
}

Mount::~Mount() {
    for (int i = 0; i < 3; ++i) {
        sem_close(semaphores_[i]);
        sem_unlink(("/" + semaphore_names_[i]).c_str());
    }
    fs::remove_all(path_);
}

std::vector<std::string> Mount::links() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(link(""))) {
        if (const std::string name = entry.path().filename(); !name.starts_with("submit-ios")) {
            names.push_back(name);
        }
    }
    return names;
}

Agent::Agent(Mount& mount, Rings rings) : mount_(mount), listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = mount.file("3fs-virt/agent.sock");
    CHECK(path.size() < sizeof(address.sun_path));
    std::strcpy(address.sun_path, path.c_str());
    unlink(path.c_str());
    CHECK_EQUAL(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    CHECK_EQUAL(listen(listener_, 16), 0);
    acceptor_ = std::thread([this] { accept_clients(); });
    if (rings == Rings::served) {
        drainer_ = std::thread([this] { drain_rings(); });
    }
}

Agent::~Agent() {
    is_stopping_ = true;
    acceptor_.join();
    if (drainer_.joinable()) {
        drainer_.join();
    }
    for (Client& client : clients_) {
        shutdown(client.socket, SHUT_RDWR);
        client.thread.join();
        close(client.socket);
    }
    close(listener_);
}

void Agent::accept_clients() {
    while (!is_stopping_) {
        pollfd listener_event{.fd = listener_, .events = POLLIN, .revents = 0};
        if (poll(&listener_event, 1, 10) > 0) {
            const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
            const std::lock_guard lock(mutex_);
            Client& client = clients_.emplace_back();
            client.socket = fd;
            ++connections;
            client.thread = std::thread([this, &client] { serve(client); });
        }
    }
}

void Agent::serve(Client& client) {
    alignas(8) std::array<std::byte, agent_message_bytes_max> message;
    for (;;) {
        alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))];
        iovec part{message.data(), message.size()};
        msghdr request{};
        request.msg_iov = &part;
        request.msg_iovlen = 1;
        request.msg_control = control;
        request.msg_controllen = sizeof(control);
        const ssize_t bytes = recvmsg(client.socket, &request, MSG_CMSG_CLOEXEC);
        if (bytes <= 0) {
            break;
        }
        AgentHeader header;
        CHECK(bytes >= static_cast<ssize_t>(sizeof(header)));
        std::memcpy(&header, message.data(), sizeof(header));
        CHECK(header.magic == agent_magic && header.version == agent_version && header.status == 0);
        CHECK_EQUAL(header.length + sizeof(header), static_cast<std::size_t>(bytes));
        if (close_at_unpublish && static_cast<AgentRequest>(header.type) == AgentRequest::unpublish) {
            break;
        }
        int fds[2] = {-1, -1};
        std::uint32_t count = 0;
        if (const cmsghdr* rights = CMSG_FIRSTHDR(&request); rights != nullptr) {
            count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            std::memcpy(fds, CMSG_DATA(rights), count * sizeof(int));
        }
        CHECK_EQUAL(header.descriptors, count);
        std::uint64_t value = 0;
        header.status = handle_request(client, header, message.data() + sizeof(header), fds, value);
        for (const int fd : fds) {
            if (fd >= 0) {
                close(fd);
            }
        }
        const std::string reason = "refused by the test";
        std::vector<std::byte> reply(sizeof(header));
        const auto type = static_cast<AgentRequest>(header.type);
        const bool has_value = type == AgentRequest::register_file || type == AgentRequest::unpublish_and_keep;
        header.length = static_cast<std::uint32_t>(header.status != 0            ? reason.size()
                                                   : type == AgentRequest::hello ? sizeof(AgentHello)
                                                   : has_value                   ? sizeof(value)
                                                                                 : 0);
        header.descriptors = 0;
        header.sequence += reply_malformed ? 1 : 0;
        reply.resize(sizeof(header) + header.length);
        std::memcpy(reply.data(), &header, sizeof(header));
        if (header.status != 0) {
            std::memcpy(reply.data() + sizeof(header), reason.data(), reason.size());
        } else if (has_value || type == AgentRequest::hello) { // The features are the first member of AgentHello.
            std::memcpy(reply.data() + sizeof(header), &value, sizeof(value));
        }
        if (send(client.socket, reply.data(), reply.size(), MSG_NOSIGNAL) < 0) {
            break;
        }
    }
    const std::lock_guard lock(mutex_);
    while (!client.published.empty()) {
        // The client was killed or exited without cleaning up, so the name of its memory remains.
        std::error_code remove_error;
        fs::remove(client.published.begin()->second->path, remove_error);
        unpublish(client, client.published.begin()->first);
    }
    borrows -= static_cast<int>(client.borrowed.size());
    client.borrowed.clear();
    files -= static_cast<int>(client.files.size());
    for (const auto& [inode, fd] : client.files) {
        close(fd);
    }
    client.files.clear();
    shutdown(client.socket, SHUT_RDWR); // The destructor closes the descriptor after it has joined this thread.
    --connections;
}

int Agent::handle_request(Client& client, const AgentHeader& header, const std::byte* payload, const int* fds,
                          std::uint64_t& value) {
    const std::lock_guard lock(mutex_);
    std::uint16_t length = 0;
    std::memcpy(&length, payload, header.length >= 2 ? 2 : 0);
    const std::string name(reinterpret_cast<const char*>(payload + 2), header.length >= 2u + length ? length : 0);
    switch (static_cast<AgentRequest>(header.type)) {
    case AgentRequest::hello:
        value = keeps_registrations ? agent_feature_keep : 0;
        return header.length == sizeof(AgentHello) ? 0 : EINVAL;
    case AgentRequest::publish:
        if (refuses_while_kept && kept_count > 0) {
            return EDQUOT;
        }
        return refusal_errno != 0 ? refusal_errno.load() : publish(client, payload, header.length, fds[0]);
    case AgentRequest::unpublish:
        if (!client.published.contains(name)) {
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
        value = attributes.st_ino;
        if (client.registrations[value]++ == 0) {
            client.files[value] = dup(fds[0]);
            ++files;
        }
        return 0;
    }
    case AgentRequest::deregister_file: {
        std::memcpy(&value, payload, sizeof(value));
        const auto entry = client.files.find(value);
        if (entry == client.files.end()) {
            return ENOENT;
        }
        if (--client.registrations[value] != 0) {
            return 0;
        }
        client.registrations.erase(value);
        close(entry->second);
        client.files.erase(entry);
        --files;
        return 0;
    }
    case AgentRequest::punch_hole: {
        std::uint32_t count = 0;
        std::memcpy(&count, payload + 8, sizeof(count));
        CHECK_EQUAL(header.length, 16 + 16 * count);
        for (std::uint32_t i = 0; i < count; ++i) {
            std::uint64_t range[2];
            std::memcpy(range, payload + 16 + 16 * i, sizeof(range));
            if (range[0] != range[1] &&
                fallocate(fds[0], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(range[0]),
                          static_cast<off_t>(range[1] - range[0])) != 0) {
                return errno;
            }
        }
        return 0;
    }
    case AgentRequest::hard_link: {
        const std::string source = "/proc/self/fd/" + std::to_string(fds[0]);
        return linkat(AT_FDCWD, source.c_str(), fds[1], name.c_str(), AT_SYMLINK_FOLLOW) == 0 ? 0 : errno;
    }
    case AgentRequest::borrow:
        return refusal_errno != 0 ? refusal_errno.load() : borrow(client, payload);
    case AgentRequest::return_borrowed:
        return return_borrowed(client, name);
    case AgentRequest::unpublish_and_keep:
        CHECK(keeps_registrations);
        if (!client.published.contains(name)) {
            return ENOENT;
        }
        unpublish(client, name);
        value = 1;
        ++kept_count;
        return 0;
    case AgentRequest::drop_kept:
        CHECK(keeps_registrations && fds[0] >= 0);
        if (refuses_while_kept) {
            usleep(5000);
        }
        --kept_count;
        return 0;
    }
    return ENOSYS;
}

int Agent::publish(Client& client, const std::byte* payload, std::size_t length, int unnamed_fd) {
    AgentPublish request;
    CHECK(length >= sizeof(request));
    std::memcpy(&request, payload, sizeof(request));
    const auto* text = reinterpret_cast<const char*>(payload + sizeof(request));
    const std::string name(text, request.name_bytes);
    const std::string target(text + request.name_bytes, request.target_bytes);
    CHECK(target.starts_with("/dev/shm/hf3fs-iov-"));
    if (unnamed_fd >= 0) {
        const std::string descriptor_path = "/proc/self/fd/" + std::to_string(unnamed_fd);
        CHECK_EQUAL(linkat(AT_FDCWD, descriptor_path.c_str(), AT_FDCWD, target.c_str(), AT_SYMLINK_FOLLOW), 0);
    }
    auto buffer = std::make_unique<Buffer>();
    buffer->path = target;
    std::error_code size_error; // The file may be missing: the client removes it when it detects that this agent ends.
    buffer->bytes = fs::file_size(target, size_error);
    if (size_error) {
        return size_error.value();
    }
    if (const int status = buffer->memory.open(target.substr(8), buffer->bytes, -1); status != 0) {
        return -status;
    }
    // After the 36 characters of the UUID, only the name of a ring has an "r" or "w".
    const std::size_t attribute_position = name.find_first_of("rw", 36);
    if (attribute_position != std::string::npos) {
        const std::size_t timeout_position = name.find(".t", attribute_position);
        CHECK(timeout_position != std::string::npos);
        std::unique_ptr<AgentRing> ring;
        if (const int status = AgentRing::attach(buffer->memory.base(), buffer->bytes,
                                                 std::atoi(name.c_str() + attribute_position + 1),
                                                 std::atoll(name.c_str() + timeout_position + 2) * 1000000, ring);
            status != 0) {
            return -status;
        }
        client.rings[name] = std::move(ring);
    }
    std::error_code error;
    if (fs::read_symlink(mount_.link(name), error) != target) {
        fs::create_symlink(target, mount_.link(name));
    }
    client.published[name] = std::move(buffer);
    ++publications;
    return 0;
}

// Takes the name by value, because a reference to the key of the erased entry would become invalid.
void Agent::unpublish(Client& client, std::string name) {
    client.rings.erase(name);
    client.published.erase(name);
    fs::remove(mount_.link(name));
    --publications;
    for (Client& other : clients_) {
        borrows -= static_cast<int>(other.borrowed.erase(name));
    }
}

int Agent::borrow(Client& client, const std::byte* payload) {
    AgentPublish request;
    std::memcpy(&request, payload, sizeof(request));
    CHECK_EQUAL(int{request.share_handle_bytes}, 0);
    const auto* text = reinterpret_cast<const char*>(payload + sizeof(request));
    const std::string name(text, request.name_bytes);
    const auto has_publication = [&](const Client& other) { return other.published.contains(name); };
    if (std::none_of(clients_.begin(), clients_.end(), has_publication)) {
        return ENOENT;
    }
    if (fs::read_symlink(mount_.link(name)) != std::string(text + request.name_bytes, request.target_bytes)) {
        return EINVAL;
    }
    borrows += ++client.borrowed[name] == 1;
    return 0;
}

int Agent::return_borrowed(Client& client, const std::string& name) {
    const auto entry = client.borrowed.find(name);
    if (entry == client.borrowed.end()) {
        return ENOENT;
    }
    if (--entry->second == 0) {
        client.borrowed.erase(entry);
        --borrows;
    }
    return 0;
}

// Returns the buffer with this id that the client has published or borrowed, or null.
const Agent::Buffer* Agent::find_buffer(const Client& client, const std::string& id) {
    for (const auto& [name, buffer] : client.published) {
        if (name.starts_with(id)) {
            return buffer.get();
        }
    }
    for (const auto& [name, count] : client.borrowed) {
        for (const Client& other : clients_) {
            if (const auto entry = other.published.find(name); name.starts_with(id) && entry != other.published.end()) {
                return entry->second.get();
            }
        }
    }
    return nullptr;
}

std::int64_t Agent::execute(Client& client, const Arguments& arguments, bool is_read) {
    Uuid id;
    std::memcpy(id.data(), arguments.buffer_id, id.size());
    const auto file = client.files.find(arguments.file_inode);
    if (file == client.files.end()) {
        return -EBADF;
    }
    const Buffer* const buffer = find_buffer(client, to_string(id));
    if (buffer == nullptr) {
        return -EACCES;
    }
    if (arguments.buffer_offset > buffer->bytes || arguments.length > buffer->bytes - arguments.buffer_offset) {
        return -EINVAL;
    }
    void* memory = buffer->memory.base() + arguments.buffer_offset;
    const auto offset = static_cast<off_t>(arguments.file_offset);
    const ssize_t byte_count = is_read ? pread(file->second, memory, arguments.length, offset)
                                       : pwrite(file->second, memory, arguments.length, offset);
    return byte_count < 0 ? -errno : byte_count;
}

std::size_t Agent::drain_ring(Client& client, AgentRing& ring, bool is_read) {
    if (is_held_) {
        return 0;
    }
    std::array<ClaimedOperation, 32> claimed;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const std::size_t count = ring.claim(claimed, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    for (std::size_t i = 0; i < count; ++i) {
        CHECK(ring.complete(claimed[i].position, execute(client, claimed[i].arguments, is_read)));
    }
    ring.flush();
    return count;
}

void Agent::hold(bool is_held) {
    const std::lock_guard lock(mutex_);
    is_held_ = is_held;
}

void Agent::drain_rings() {
    while (!is_stopping_) {
        std::size_t count = 0;
        bool are_all_idle = true;
        {
            const std::lock_guard lock(mutex_);
            for (Client& client : clients_) {
                for (auto& [name, ring] : client.rings) {
                    count += drain_ring(client, *ring, name.find(".r", 36) != std::string::npos);
                }
            }
            if (count == 0) {
                for (Client& client : clients_) {
                    for (auto& [name, ring] : client.rings) {
                        are_all_idle = ring->prepare_to_sleep() && are_all_idle;
                    }
                }
            }
        }
        if (count == 0) {
            timespec deadline{};
            clock_gettime(CLOCK_REALTIME, &deadline);
            deadline.tv_nsec += are_all_idle ? 2000000 : 20000;
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
