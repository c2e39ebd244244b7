// The agent's loop: one thread drains rings, sends their operations to the storage server and posts completions.
//
// The agent tells the loop which clients, buffers, files and rings to serve. A client is a number. The rings of a
// client can use only buffers and files of the same client.
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

// Set when the last operation in flight of an object that is being removed has ended.
using Drained = std::shared_ptr<std::promise<void>>;

struct Buffer {
    BufferSpec spec;
    std::size_t in_flight = 0;
    std::uint16_t queue_pair = 0; // Index of the queue pair that is used in this turn.
    std::uint64_t turn_bytes = 0; // Bytes that were assigned to it in this turn.
    bool is_closing = false;
    bool is_refused = false; // A NIC refused it: its memory was freed or truncated. No further operation uses it.
    std::vector<Drained> drain_waiters;
};

struct File {
    FileSpec spec;
    std::size_t in_flight = 0;
    bool is_closing = false;
    std::vector<Drained> drain_waiters;
};

struct RingEntry {
    std::unique_ptr<Ring> ring;
    std::vector<Drained> drain_waiters;
};

struct Client {
    std::uint64_t number = 0;
    std::unordered_map<Id, std::unique_ptr<Buffer>, IdHash> buffers;
    std::unordered_map<std::uint64_t, std::unique_ptr<File>> files;
    std::unordered_map<Id, RingEntry, IdHash> rings;
};

// Limits malloc to two arenas, which keeps the process small. Call it before the process has threads, and only in a
// process that is nothing but an agent.
void limit_arenas() noexcept;

class Loop {
public:
    // `semaphores`: names of the submit semaphores, high priority first. Throws std::system_error.
    Loop(const Options& options, const std::array<std::string, priority_classes>& semaphores);
    ~Loop();
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    // The loop executes each of these calls between two passes, and the caller waits for that. They throw
    // std::system_error: EEXIST; ENOENT, the client does not exist ...
    void add_client(std::uint64_t client);
    void add_buffer(std::uint64_t client, const BufferSpec& spec);
    void set_file(std::uint64_t client, const FileSpec& spec); // Adds a file, or changes its permissions and handles.
    void add_ring(std::uint64_t client, const RingSpec& spec, int fd);

    // These return false if operations are still in flight after `timeout`. No new operations begin, and the caller may
    // call again.
    bool remove_buffer(std::uint64_t client, const Id& id, std::chrono::milliseconds timeout);
    bool remove_file(std::uint64_t client, std::uint64_t inode, std::chrono::milliseconds timeout);
    bool remove_ring(std::uint64_t client, const Id& id, std::chrono::milliseconds timeout);
    void remove_client(std::uint64_t client); // EBUSY: it still has buffers, files or rings.

    // Sends operations over this socket from now on. `queue_pair_nics`: number of the NIC of each queue pair. EBUSY:
    // the loop is already connected.
    void connect(int socket, std::vector<std::uint16_t> queue_pair_nics, std::uint64_t generation);
    // Call it when the server cannot access memory any more. Operations in flight end with -EREMOTEIO. If the server
    // has reported that the memory of one operation ended the session, only operations in flight in that memory do; all
    // others wait for the next connect(), which sends them again, or for abandon(). Returns true if operations may
    // wait.
    bool disconnect();
    // Ends the operations that wait for a new connection with -EREMOTEIO.
    void abandon();

    Statistics statistics();
    // Returns the events since the last call, oldest first; none if nothing happens until `timeout`.
    std::vector<Event> events(std::chrono::milliseconds timeout);
    void stop(); // Ends the thread. Objects of clients that were not removed are dropped.

private:
    using Clock = std::chrono::steady_clock;
    struct InFlight {
        Ring* ring = nullptr; // Null: the entry is free.
        Buffer* buffer = nullptr;
        File* file = nullptr;
        std::uint64_t length = 0;
        std::uint64_t buffer_offset = 0;
        std::uint64_t file_offset = 0;
        std::uint32_t position = 0; // Position in the ring.
        std::uint32_t generation = 0;
    };

    template <class Function> auto call(Function function) -> std::invoke_result_t<Function>;
    bool wait_drained(const std::function<Drained()>& request, std::chrono::milliseconds timeout);
    Client& find_client(std::uint64_t number);
    void wake() noexcept;
    void report(const Event& event);

    void run();
    bool run_commands();
    bool drain_rings();
    bool drain(Ring& ring, std::int64_t now_ns);
    bool send_and_receive();
    void handle_entry(Ring& ring, const ClaimedOperation& entry);
    int check(Ring& ring, const ClaimedOperation& entry, Buffer*& buffer, File*& file);
    void begin(Ring& ring, const ClaimedOperation& entry, Buffer& buffer, File& file);
    void send(std::uint32_t index);
    std::uint16_t choose_queue_pair(Buffer& buffer, std::uint64_t length) const;
    bool handle_result(std::uint64_t tag, std::int64_t result);
    void complete(std::uint32_t index, std::int64_t result);
    void post_completion(Ring& ring, std::uint32_t position, std::int64_t result);
    bool is_full() const noexcept {
        return free_indices_.empty() || has_refusal_ || (connection_ && connection_->has_backlog());
    }
    void publish_completions();
    void report_broken(Ring& ring);
    bool has_in_flight() const noexcept { return free_indices_.size() != in_flight_.size(); }
    void report_lost(Event::Kind kind);
    bool is_silent(Clock::time_point now);
    void sleep();
    bool announce_sleep();
    void stop_draining(Ring& ring);

    Options options_;
    Descriptor event_;
    std::unique_ptr<SemaphoreWatcher> watcher_;

    std::mutex commands_lock_;
    std::deque<std::function<void()>> commands_;
    std::atomic<bool> has_commands_{false};
    bool is_shut_down_ = false; // No further command is accepted. Guarded by commands_lock_.

    std::mutex events_lock_;
    std::condition_variable events_changed_;
    std::vector<Event> events_;

    // The members below belong to the loop's thread.
    std::unordered_map<std::uint64_t, std::unique_ptr<Client>> clients_;
    std::array<std::vector<Ring*>, priority_classes> rings_;
    std::array<std::size_t, priority_classes> first_ring_{};
    std::uint64_t pass_count_ = 0;
    std::unique_ptr<Connection> connection_;
    bool is_connected_ = false;
    // The memory of one operation ended the last connection: rings and all other operations wait for the next
    // connection.
    bool has_refusal_ = false;
    std::uint64_t generation_ = 0;
    std::vector<std::uint16_t> queue_pair_nics_;
    Clock::time_point last_result_time_{}; // Time of the last result, or of the first operation that was sent when none
                                           // was in flight.
    std::vector<InFlight> in_flight_;
    std::vector<std::uint32_t> free_indices_;
    std::vector<storage::Operation> unsent_;
    std::vector<Ring*> unpublished_;
    std::vector<ClaimedOperation> claimed_;
    Statistics statistics_;
    bool is_stopping_ = false;
    std::thread thread_;
};

} // namespace gdrkit::usrbio::agent
