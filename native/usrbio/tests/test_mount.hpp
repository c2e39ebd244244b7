// A mount in a temporary folder, and a minimal agent for it, for the tests of the client library. The agent implements
// the protocol of agent.sock (agent_protocol.hpp), and executes the operations in rings by pread and pwrite on ordinary
// files. The agent runs on threads of the test's process.
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

// A folder that the client library accepts as a mount of 3FS: it has the folder 3fs-virt/iovs, with links to the
// three submit semaphores. The destructor removes the folder and the semaphores.
class Mount {
public:
    Mount();
    ~Mount();
    Mount(const Mount&) = delete;
    Mount& operator=(const Mount&) = delete;

    const char* path() const noexcept { return path_.c_str(); }
    std::string file_path(const std::string& name) const { return path_ + "/" + name; }
    std::string link_path(const std::string& name) const { return make_link_path(path_.c_str(), name); }
    // Returns the names of the links by which clients have published iovs and rings.
    std::vector<std::string> link_names() const;
    // Submit semaphore of a priority: 0 high, 1 normal, 2 low.
    sem_t* submit_semaphore(int priority) const noexcept { return semaphores_[priority]; }

private:
    std::string path_;
    std::string semaphore_names_[3];
    sem_t* semaphores_[3];
};

// The minimal agent. Tests read its counters, and set its flags to make requests fail.
class Agent {
public:
    // With Rings::served, a thread of this agent serves the rings. With Rings::not_served, the test itself serves them.
    enum class Rings : std::uint8_t { served, not_served };
    explicit Agent(Mount& mount, Rings rings = Rings::served);
    ~Agent(); // Closes every connection.

    // Errno with which the agent refuses publications, borrows and registrations of files; 0: no refusal.
    std::atomic<int> refusal_errno{0};
    // After set_rings_paused(true), the agent claims no operation from the rings until set_rings_paused(false). When
    // set_rings_paused() returns, all operations claimed before have completed.
    void set_rings_paused(bool is_paused);
    // If true, the agent reports agent_feature_keep: after an unpublish, the agent keeps the registration of the memory
    // for the next iov.
    std::atomic<bool> keeps_registrations{false};
    // Number of times that the agent kept a registration, minus the number of kept registrations that clients ended. An
    // iov that uses a kept registration again does not decrement this number.
    std::atomic<int> kept_registration_count{0};
    // If true, a publish request fails with EDQUOT while the agent keeps registrations, and drop_kept takes 5 ms.
    std::atomic<bool> refuses_publish_while_kept{false};
    std::atomic<bool> corrupts_replies{false};    // If true, the replies carry a wrong sequence number.
    std::atomic<bool> closes_at_unpublish{false}; // If true, an unpublish request makes the agent close the connection.
    std::atomic<int> registered_file_count{0};    // Number of registered files.
    std::atomic<int> publication_count{0};        // Number of publications that exist.
    // Number of borrowed names, summed over all clients. A client borrows the publication of another process to use
    // the published memory.
    std::atomic<int> borrow_count{0};
    std::atomic<int> connection_count{0}; // Number of connected clients.

private:
    // Memory that a client has published: an iov or a ring.
    struct Buffer {
        std::string shm_path; // Path of the file in /dev/shm.
        SharedMemory memory;
        std::size_t size_bytes = 0;
    };
    struct Client {
        int socket_fd = -1;
        std::thread thread;
        std::map<std::string, std::unique_ptr<Buffer>> published_buffers; // By link name; also the memory of rings.
        std::map<std::string, std::unique_ptr<AgentRing>> rings;          // By link name.
        std::map<std::string, int> borrow_counts;                         // Number of borrows of each link name.
        std::map<std::uint64_t, int> file_fds;                 // Descriptor of each registered file, by inode.
        std::map<std::uint64_t, int> file_registration_counts; // Number of registrations of each file, by inode.
    };
    void accept_clients();
    void serve(Client& client);
    // Executes a request and returns 0 or a positive errno. `fds`: two elements, the descriptors that came with the
    // request, or -1. For requests whose reply is one number, sets `reply_value`.
    int handle_request(Client& client, const AgentHeader& header, const std::byte* payload, const int* fds,
                       std::uint64_t& reply_value);
    // publish(), borrow() and return_borrowed() return 0 or a positive errno. `unnamed_fd`: memory that has no name in
    // /dev/shm yet, or -1.
    int publish(Client& client, const std::byte* payload, std::size_t length, int unnamed_fd);
    void unpublish(Client& client, std::string name);
    int borrow(Client& client, const std::byte* payload);
    int return_borrowed(Client& client, const std::string& name);
    const Buffer* find_buffer(const Client& client, const std::string& uuid_text);
    void drain_rings(); // Runs on ring_thread_: executes the operations in all rings until the agent stops.
    // Executes the operations that can be claimed from one ring, and returns their number.
    std::size_t drain_ring(Client& client, AgentRing& ring, bool is_read);
    // Executes one operation. Returns the number of bytes or -errno.
    std::int64_t execute(Client& client, const Arguments& arguments, bool is_read);

    Mount& mount_;
    int listener_fd_;
    std::mutex mutex_;
    bool is_paused_ = false;
    std::list<Client> clients_;
    std::atomic<bool> is_stopping_{false};
    std::thread accepting_thread_;
    std::thread ring_thread_;
};

} // namespace gdrkit::usrbio::test
