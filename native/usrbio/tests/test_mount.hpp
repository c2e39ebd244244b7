// A mount in a temporary folder, and a minimal agent for it, for the tests of the client library. The agent implements
// the protocol of the socket, and executes the operations in rings by pread and pwrite on ordinary files. It runs on
// threads of the test.
#pragma once

#include "usrbio/client/agent_protocol.hpp"
#include "usrbio/client/names.hpp"
#include "usrbio/client/shared_memory.hpp"
#include "usrbio/ring/agent_side.hpp"

#include <semaphore.h>

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace gdrkit::usrbio::test {

// A folder with semaphores and their links, which the destructor removes.
class Mount {
public:
    Mount();
    ~Mount();
    Mount(const Mount&) = delete;
    Mount& operator=(const Mount&) = delete;

    const char* path() const noexcept { return path_.c_str(); }
    std::string file(const std::string& name) const { return path_ + "/" + name; }
    std::string link(const std::string& name) const { return make_link_path(path_.c_str(), name); }
    std::vector<std::string> links() const; // Names of the links by which clients have published iovs and rings.
    // Submit semaphore of a priority: 0 high, 1 normal, 2 low.
    sem_t* submit_semaphore(int priority) const noexcept { return semaphores_[priority]; }

private:
    std::string path_;
    std::string semaphore_names_[3];
    sem_t* semaphores_[3];
};

class Agent {
public:
    // With Rings::not_served, the code that created this agent serves the rings.
    enum class Rings : std::uint8_t { served, not_served };
    explicit Agent(Mount& mount, Rings rings = Rings::served);
    ~Agent(); // Closes every connection.

    std::atomic<int> refusal_errno{0}; // Errno of the next publications, borrows and registrations; 0: they succeed.
    // After hold(true), the agent claims no operation from the rings until hold(false). When hold() returns, all
    // operations claimed before have completed.
    void hold(bool is_held);
    // If true, the agent reports agent_feature_keep: after an unpublish, it keeps the registration of the memory for
    // the next iov. `kept_count` is the number of these registrations.
    std::atomic<bool> keeps_registrations{false};
    std::atomic<int> kept_count{0};
    // If true, a publish request fails with EDQUOT while the agent keeps registrations. Each deregistration takes 5 ms.
    std::atomic<bool> refuses_while_kept{false};
    std::atomic<bool> reply_malformed{false};    // The replies carry a wrong sequence number.
    std::atomic<bool> close_at_unpublish{false}; // The agent closes the connection at the next unpublish.
    std::atomic<int> files{0};                   // Number of registered files.
    std::atomic<int> publications{0};            // Number of publications that exist.
    // Number of borrowed names, summed over all clients. A client borrows the publication of another process to use its
    // memory.
    std::atomic<int> borrows{0};
    std::atomic<int> connections{0}; // Number of connected clients.

private:
    struct Buffer {
        std::string path;
        SharedMemory memory;
        std::size_t bytes = 0;
    };
    struct Client {
        int socket = -1;
        std::thread thread;
        std::map<std::string, std::unique_ptr<Buffer>> published;
        std::map<std::string, std::unique_ptr<AgentRing>> rings;
        std::map<std::uint64_t, int> files;         // Descriptor of each registered file, by inode.
        std::map<std::string, int> borrowed;        // Number of borrows of each name.
        std::map<std::uint64_t, int> registrations; // Number of registrations of each file, by inode.
    };
    void accept_clients();
    void serve(Client& client);
    int handle_request(Client& client, const AgentHeader& header, const std::byte* payload, const int* fds,
                       std::uint64_t& reply_value);
    int publish(Client& client, const std::byte* payload, std::size_t length, int unnamed_fd);
    void unpublish(Client& client, std::string name);
    int borrow(Client& client, const std::byte* payload);
    int return_borrowed(Client& client, const std::string& name);
    const Buffer* find_buffer(const Client& client, const std::string& id);
    void drain_rings();
    std::size_t drain_ring(Client& client, AgentRing& ring, bool is_read);
    std::int64_t execute(Client& client, const Arguments& arguments, bool is_read);

    Mount& mount_;
    int listener_;
    std::mutex mutex_;
    bool is_held_ = false;
    std::list<Client> clients_;
    std::atomic<bool> is_stopping_{false};
    std::thread acceptor_;
    std::thread drainer_;
};

} // namespace gdrkit::usrbio::test
