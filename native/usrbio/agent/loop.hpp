// The agent's loop: one thread drains rings, sends their operations to the storage server and posts completions.
//
// Everything else tells it what it may serve. A client is a number; its rings can name its own buffers and files alone.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "usrbio/agent/connection.hpp"
#include "usrbio/agent/ring.hpp"
#include "usrbio/agent/types.hpp"
#include "usrbio/agent/watcher.hpp"

namespace gdrkit::usrbio::agent {

// Set when the last operation in flight of something that is being removed has ended.
using Drained = std::shared_ptr<std::promise<void>>;

struct Buffer {
    BufferSpec spec;
    std::size_t in_flight = 0;
    std::uint16_t lane = 0;       // Whose turn it is,
    std::uint64_t turn_bytes = 0; // and what it got in this turn.
    bool is_closing = false;
    bool is_refused = false; // By a NIC: it is gone, or was cut short. No operation goes there any more.
    std::vector<Drained> waiting;
};

struct File {
    FileSpec spec;
    std::size_t in_flight = 0;
    bool is_closing = false;
    std::vector<Drained> waiting;
};

struct RingEntry {
    std::unique_ptr<Ring> ring;
    std::vector<Drained> waiting;
};

struct Client {
    std::uint64_t number = 0;
    std::unordered_map<Id, std::unique_ptr<Buffer>, IdHash> buffers;
    std::unordered_map<std::uint64_t, std::unique_ptr<File>> files;
    std::unordered_map<Id, RingEntry, IdHash> rings;
};

// For a process that is an agent and nothing else, before it has threads: what its clients leave in malloc stays small.
void limit_arenas() noexcept;

class Loop {
public:
    // `semaphores`: the names of the submit semaphores, high priority first. Throws std::system_error.
    Loop(const Options& options, const std::array<std::string, priority_classes>& semaphores);
    ~Loop();
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    // All of these wait for the loop, which does them between two passes. The adding ones throw std::system_error
    // (EEXIST, ENOENT: no such client ...).
    void add_client(std::uint64_t client);
    void add_buffer(std::uint64_t client, const BufferSpec& spec);
    void set_file(std::uint64_t client, const FileSpec& spec); // New, or with other rights and handles.
    void add_ring(std::uint64_t client, const RingSpec& spec, int fd);

    // False: operations are in flight after `timeout`; no new ones begin, and asking again is right.
    bool remove_buffer(std::uint64_t client, const Id& id, std::chrono::milliseconds timeout);
    bool remove_file(std::uint64_t client, std::uint64_t inode, std::chrono::milliseconds timeout);
    bool remove_ring(std::uint64_t client, const Id& id, std::chrono::milliseconds timeout);
    void remove_client(std::uint64_t client); // EBUSY: it still has something.

    // From now on operations go there; `lanes` has the number of the NIC of each lane. EBUSY: still connected.
    void connect(int socket, std::vector<std::uint16_t> lanes, std::uint64_t generation);
    // The server reaches no memory any more. What is in flight ends with -EREMOTEIO; but where the server said that the
    // memory of one operation ended the session, only what is in flight in that memory does. Everything else waits for
    // the next connect(), which sends it again, or for abandon(). True: something may wait.
    bool disconnect();
    // There will be no connection soon: what waits for one ends with -EREMOTEIO.
    void abandon();

    Statistics statistics();
    // What happened, oldest first; empty when nothing does until `timeout`.
    std::vector<Event> events(std::chrono::milliseconds timeout);
    void stop(); // Ends the thread; everything of clients must be gone or is dropped as it is.

private:
    using Clock = std::chrono::steady_clock;
    struct Flight {
        Ring* ring = nullptr; // Null: free.
        Buffer* buffer = nullptr;
        File* file = nullptr;
        std::uint64_t length = 0;
        std::uint64_t buffer_offset = 0;
        std::uint64_t file_offset = 0;
        std::uint32_t position = 0; // In the ring.
        std::uint32_t generation = 0;
    };

    template <class Function> auto call(Function function) -> std::invoke_result_t<Function>;
    bool drained(const std::function<Drained()>& ask, std::chrono::milliseconds timeout);
    Client& client_of(std::uint64_t number);
    void wake() noexcept;
    void tell(const Event& event);

    void run();
    bool run_commands();
    bool drain_rings();
    bool drain(Ring& ring, std::int64_t now_ns);
    bool send_and_receive();
    void take(Ring& ring, const ClaimedOperation& entry);
    int check(Ring& ring, const ClaimedOperation& entry, Buffer*& buffer, File*& file);
    void start(Ring& ring, const ClaimedOperation& entry, Buffer& buffer, File& file);
    void send(std::uint32_t slot);
    std::uint16_t choose_lane(Buffer& buffer, std::uint64_t length) const;
    bool finish(std::uint64_t tag, std::int64_t result);
    void complete(std::uint32_t slot, std::int64_t result);
    void answer(Ring& ring, std::uint32_t position, std::int64_t result);
    bool is_full() const noexcept {
        return free_.empty() || has_refusal_ || (connection_ && connection_->has_backlog());
    }
    void announce();
    void broke(Ring& ring);
    bool has_flights() const noexcept { return free_.size() != flights_.size(); }
    void lost(Event::Kind kind);
    bool is_silent(Clock::time_point now);
    void sleep();
    bool announce_sleep();
    void forget(Ring& ring);

    Options options_;
    Descriptor event_;
    std::unique_ptr<Watcher> watcher_;

    std::mutex commands_lock_;
    std::deque<std::function<void()>> commands_;
    std::atomic<bool> has_commands_{false};
    bool is_over_ = false; // Guarded by commands_lock_: no command is taken any more.

    std::mutex events_lock_;
    std::condition_variable events_changed_;
    std::vector<Event> events_;

    // Of the loop's thread alone.
    std::unordered_map<std::uint64_t, std::unique_ptr<Client>> clients_;
    std::array<std::vector<Ring*>, priority_classes> rings_;
    std::array<std::size_t, priority_classes> first_{};
    std::uint64_t passes_ = 0;
    std::unique_ptr<Connection> connection_;
    bool is_connected_ = false;
    // The memory of one operation ended the last connection: rings and all other operations wait for the next one.
    bool has_refusal_ = false;
    std::uint64_t generation_ = 0;
    std::vector<std::uint16_t> lanes_;
    Clock::time_point heard_{}; // The last result, or when the first operation went where nothing was in flight.
    std::vector<Flight> flights_;
    std::vector<std::uint32_t> free_;
    std::vector<storage::Operation> pending_;
    std::vector<Ring*> touched_;
    std::vector<ClaimedOperation> claimed_;
    Statistics statistics_;
    bool is_stopping_ = false;
    std::thread thread_;
};

} // namespace gdrkit::usrbio::agent
