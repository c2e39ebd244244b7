// The agent's loop: one thread drains rings, sends the operations to the storage server and posts completions.
//
// The agent's Python code adds and removes the clients, buffers, files and rings that the loop serves. A client is
// identified by a number that the agent chooses. The rings of a client can use only buffers and files of that client.
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
#include "usrbio/agent/local_file.hpp"
#include "usrbio/agent/local_reader.hpp"
#include "usrbio/agent/ring.hpp"
#include "usrbio/agent/types.hpp"
#include "usrbio/agent/watcher.hpp"

namespace gdrkit::usrbio::agent {

// A promise that the loop fulfills when the last operation in flight of a removed object has ended.
using DrainPromise = std::shared_ptr<std::promise<void>>;

struct Buffer {
    BufferSpec spec;
    std::size_t in_flight_count = 0;    // Number of operations in flight.
    std::uint16_t queue_pair_index = 0; // The queue pair that operations of this buffer use now.
    std::uint64_t queue_pair_bytes = 0; // Bytes of operations since the buffer moved to this queue pair.
    bool is_closing = false;            // The buffer is removed when its operations in flight have ended.
    std::unique_ptr<BusGuard> guard;    // Guards the mapping in BufferSpec; null: there is none.
    bool is_refused = false; // A NIC refused the memory, which was freed or truncated. No further operation uses it.
    std::vector<DrainPromise> drain_promises;
};

struct File {
    FileSpec spec;
    std::unique_ptr<LocalFile> local_file; // Null: every operation goes to the storage server.
    std::size_t in_flight_count = 0;       // Number of operations in flight.
    bool is_closing = false;               // The file is removed when its operations in flight have ended.
    std::vector<DrainPromise> drain_promises;
};

struct ClientRing {
    std::unique_ptr<Ring> ring;
    std::vector<DrainPromise> drain_promises;
};

struct Client {
    std::uint64_t number = 0;
    std::unordered_map<Id, std::unique_ptr<Buffer>, IdHash> buffers;
    std::unordered_map<std::uint64_t, std::unique_ptr<File>> files; // By inode.
    std::unordered_map<Id, ClientRing, IdHash> rings;
};

// Limits malloc to two arenas, which reduces the memory of the process. Call it only in a process that is an agent,
// before the process starts threads.
void limit_arenas() noexcept;

class Loop {
public:
    // Starts the thread. `semaphore_names`: names of the submit semaphores, high priority first. Throws
    // std::system_error.
    Loop(const Options& options, const std::array<std::string, priority_class_count>& semaphore_names);
    ~Loop();
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    // The loop's thread executes each of these calls between two passes over the rings, and the caller waits for the
    // result. These functions throw std::system_error: EEXIST, the object exists already; ENOENT, the client does not
    // exist; ESHUTDOWN, stop() was called. set_file() also fails with EBUSY if the file is being removed, and
    // add_ring() with EINVAL if the memory is not a valid ring.
    void add_client(std::uint64_t client_number);
    void add_buffer(std::uint64_t client_number, const BufferSpec& spec);
    // Adds a file, or changes its permissions and handles. `descriptor`: the file, open for reading, if its store was
    // passed to set_local_store(). With this descriptor, the loop itself reads bytes that are in the page cache.
    void set_file(std::uint64_t client_number, const FileSpec& spec, Descriptor descriptor = {});
    void add_ring(std::uint64_t client_number, const RingSpec& spec, int fd);

    // These functions remove an object when its operations in flight have ended. Meanwhile, no new operation of the
    // object starts. They return false if operations are still in flight after `timeout`. The caller may then call
    // again.
    bool remove_buffer(std::uint64_t client_number, const Id& id, std::chrono::milliseconds timeout);
    bool remove_file(std::uint64_t client_number, std::uint64_t inode, std::chrono::milliseconds timeout);
    bool remove_ring(std::uint64_t client_number, const Id& id, std::chrono::milliseconds timeout);
    void remove_client(std::uint64_t client_number); // EBUSY: the client still has buffers, files or rings.

    // Call this function if the storage server runs on this machine. `sums_folder`: the folder with the checksums of
    // the server's store. `generation_memory`: the memory of the storage::SumsGeneration. Throws std::system_error.
    void set_local_store(Descriptor sums_folder, Descriptor generation_memory);

    // From now on, sends operations over `socket`. Takes ownership of `socket`, also on failure. `queue_pair_nics`: for
    // each queue pair, the index of its NIC in BufferSpec::remote_keys. `generation`: a number that events of this
    // connection carry. EBUSY: the loop is already connected.
    void connect(int socket, std::vector<std::uint16_t> queue_pair_nics, std::uint64_t generation);
    // Ends the connection. Call this function only when the server cannot access memory any more. Normally completes
    // all operations in flight with -EREMOTEIO and returns false. If the session ended because a NIC refused the memory
    // of an operation, completes only the operations in that memory and returns true. The other operations then wait
    // until the next connect() sends them again, or until abandon() ends them.
    bool disconnect();
    // Completes, with -EREMOTEIO, the operations that wait for a new connection since disconnect() returned true.
    void abandon();

    Statistics statistics();
    // Waits until there is an event, at most `timeout`. Returns the events since the last call, oldest first.
    std::vector<Event> events(std::chrono::milliseconds timeout);
    void stop(); // Ends the thread. Clients, buffers, files and rings that still exist are destroyed.

private:
    using Clock = std::chrono::steady_clock;
    // An operation in flight, or a free element of in_flight_.
    struct InFlight {
        Ring* ring = nullptr; // Null: this element is free.
        Buffer* buffer = nullptr;
        File* file = nullptr;
        std::uint64_t length = 0;
        std::uint64_t buffer_offset = 0;
        std::uint64_t file_offset = 0;
        std::uint32_t position = 0;   // Position in the ring's submission queue.
        std::uint32_t generation = 0; // Number of uses of this element; see make_tag() in loop_io.cpp.
    };

    // A cache of the objects that the last checked entry names, because most entries of one AgentRing::claim() name the
    // same objects. No object is removed while these entries are handled.
    struct EntryObjects {
        Id id{}; // Id of the buffer.
        Buffer* buffer = nullptr;
        File* file = nullptr;
    };
    // An entry of a ring whose read the loop executes itself.
    struct LocalRead {
        const ClaimedOperation* entry = nullptr;
        Buffer* buffer = nullptr;
        File* file = nullptr;
    };

    template <class Function> auto run_in_loop_thread(Function function) -> std::invoke_result_t<Function>;
    bool remove_and_wait(const std::function<DrainPromise()>& remove, std::chrono::milliseconds timeout);
    Client& find_client(std::uint64_t client_number);
    void wake() noexcept;
    void add_event(const Event& event);

    void run();
    bool run_commands();
    bool drain_rings();
    bool drain_ring(Ring& ring, std::int64_t now_ns);
    bool send_and_receive();
    void handle_entry(Ring& ring, const ClaimedOperation& entry);
    int check_entry(Ring& ring, const ClaimedOperation& entry, Buffer*& buffer, File*& file);
    bool add_local_read(Ring& ring, const ClaimedOperation& entry, Buffer& buffer, File& file);
    void run_local_reads(Ring& ring);
    void start_operation(Ring& ring, const ClaimedOperation& entry, Buffer& buffer, File& file);
    void add_request(std::uint32_t index);
    std::uint16_t choose_queue_pair(Buffer& buffer, std::uint64_t length) const;
    bool handle_result(std::uint64_t tag, std::int64_t result);
    void complete_operation(std::uint32_t index, std::int64_t result);
    void post_completion(Ring& ring, std::uint32_t position, std::int64_t result);
    // Returns whether the loop must not claim further entries now.
    bool is_full() const noexcept {
        return free_indices_.empty() || has_memory_refusal_ || (connection_ && connection_->has_backlog());
    }
    void publish_completions();
    void report_broken_ring(Ring& ring);
    bool has_in_flight() const noexcept { return free_indices_.size() != in_flight_.size(); }
    void report_lost_connection(Event::Kind kind);
    bool report_silent_server(Clock::time_point now);
    void sleep();
    bool announce_sleep();
    void stop_draining(Ring& ring);

    Options options_;
    Descriptor wake_event_; // An eventfd that ends the sleep of the loop's thread.
    std::unique_ptr<SemaphoreWatcher> watcher_;

    std::mutex commands_lock_;
    std::deque<std::function<void()>> commands_;
    std::atomic<bool> has_commands_{false};
    bool is_shut_down_ = false;               // The loop accepts no further command. Guarded by commands_lock_.
    std::shared_ptr<LocalStore> local_store_; // Guarded by commands_lock_.

    std::mutex events_lock_;
    std::condition_variable events_changed_;
    std::vector<Event> events_;

    // Only the loop's thread uses the members below.
    std::unordered_map<std::uint64_t, std::unique_ptr<Client>> clients_;
    std::array<std::vector<Ring*>, priority_class_count> rings_; // By priority.
    // For each priority, a counter. Modulo the number of rings, it is the index of the ring with which the next pass
    // begins.
    std::array<std::size_t, priority_class_count> rotation_counts_{};
    std::uint64_t pass_count_ = 0;
    std::unique_ptr<Connection> connection_;
    bool is_connected_ = false;
    // True if the last connection ended because a NIC refused the memory of one operation. Until the next connection,
    // the loop claims no entries, and the operations in other memory wait.
    bool has_memory_refusal_ = false;
    std::uint64_t connection_generation_ = 0;    // Number of the connection, which its events carry.
    std::vector<std::uint16_t> queue_pair_nics_; // The NIC of each queue pair; see connect().
    // Time from which the silence of the server is measured: the time of the last result, or of the first operation
    // after a time without operations in flight.
    Clock::time_point silence_start_time_{};
    LocalReader local_reader_;
    // The reads in the batch of local_reader_, in the same order. All of them belong to one ring.
    std::vector<LocalRead> local_reads_;
    // Bytes that the loop has copied so far, also for reads that it then left to the server.
    std::uint64_t local_bytes_ = 0;
    // When local_bytes_ reaches this value, the loop sends further reads of the current ring to the server, until its
    // next pass.
    std::uint64_t local_bytes_limit_ = 0;
    std::vector<InFlight> in_flight_;
    std::vector<std::uint32_t> free_indices_; // Indices of the free elements of in_flight_.
    std::vector<storage::Operation> unsent_requests_;
    std::vector<Ring*> unpublished_rings_; // Rings with completions that were not published yet.
    std::vector<ClaimedOperation> claimed_entries_;
    EntryObjects last_entry_objects_;
    Statistics statistics_;
    bool is_stopping_ = false;
    std::thread thread_;
};

} // namespace gdrkit::usrbio::agent
