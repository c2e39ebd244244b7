// A plain mount in a temporary folder, and an agent for it: the least that speaks the protocol of the socket and drains
// rings against ordinary files with pread and pwrite. It runs on threads of the test or in a process of its own.
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

// The folder, its semaphores and their links; all gone at the end.
class Mount {
public:
    Mount();
    ~Mount();
    Mount(const Mount&) = delete;
    Mount& operator=(const Mount&) = delete;

    const char* path() const noexcept { return path_.c_str(); }
    std::string file(const std::string& name) const { return path_ + "/" + name; }
    std::string link(const std::string& name) const { return link_path(path_.c_str(), name); }
    std::vector<std::string> links() const; // Of publications.
    sem_t* submit(int which) const noexcept { return semaphores_[which]; }

private:
    std::string path_;
    std::string semaphore_names_[3];
    sem_t* semaphores_[3];
};

class Agent {
public:
    enum class Rings : std::uint8_t { served, left_alone }; // Left to whoever made this agent.
    explicit Agent(Mount& mount, Rings rings = Rings::served);
    ~Agent(); // Ends every connection.

    std::atomic<int> refuse{0}; // What the next publication or registration answers; 0: it is served.
    // Takes nothing out of the rings until it is let; what it has taken out is done when this returns.
    void hold(bool held);
    std::atomic<bool> answer_rubbish{false};
    std::atomic<bool> hang_up{false}; // The next thing that is taken back is answered by the end of the connection.
    std::atomic<int> files{0};        // Registered.
    std::atomic<int> publications{0};
    std::atomic<int> borrowings{0}; // Names times clients.
    std::atomic<int> connections{0};

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
        std::map<std::uint64_t, int> files;
        std::map<std::string, int> borrowed;        // How often.
        std::map<std::uint64_t, int> registrations; // Of each of them.
    };
    void accept_clients();
    void serve(Client& client);
    int answer(Client& client, const AgentHeader& header, const std::byte* payload, const int* fds,
               std::uint64_t& value);
    int publish(Client& client, const std::byte* payload, std::size_t length, int unnamed);
    void unpublish(Client& client, std::string name);
    int borrow(Client& client, const std::byte* payload);
    int give_back(Client& client, const std::string& name);
    const Buffer* find(const Client& client, const std::string& id);
    void drain();
    std::size_t drain_ring(Client& client, AgentRing& ring, bool read);
    std::int64_t move(Client& client, const Arguments& arguments, bool read);

    Mount& mount_;
    int listener_;
    std::mutex mutex_;
    bool hold_ = false;
    std::list<Client> clients_;
    std::atomic<bool> stop_{false};
    std::thread acceptor_;
    std::thread drainer_;
};

} // namespace gdrkit::usrbio::test
