// A session of the storage service, which serves one client. It owns the queue pairs to the client, the client's open
// files, and the thread that serves the client's data connection.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "storage/parser.hpp"
#include "storage/queue_pairs.hpp"
#include "storage/store_file.hpp"
#include "verbs/staging.hpp"

namespace gdrkit::storage {

struct SessionLimits {
    std::uint32_t outstanding_max = 1024;                    // Largest number of operations without a result.
    std::uint64_t length_bytes_max = std::uint64_t{1} << 30; // Largest length of one operation.
    // Largest length of one transfer, and of an operation with checksum_given.
    std::uint32_t segment_bytes = 256 * 1024;
    // Time that the thread polls without any progress before it sleeps, if no operation is in progress. Otherwise it
    // polls four times as long.
    std::uint32_t spin_us = 50;
};

class Session {
public:
    // Creates the queue pairs, and connects each to a queue pair of the client. Throws verbs::Error.
    Session(std::shared_ptr<Store> store, std::shared_ptr<Fabric> fabric,
            const std::vector<verbs::Endpoint>& client_endpoints, const SessionLimits& limits);
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session();

    std::vector<verbs::Endpoint> endpoints() const { return queue_pairs_->endpoints(); }
    std::uint8_t reads_max() const { return queue_pairs_->reads_max(); }

    // The client names a file by its `handle`. remove_file() returns false if there is no file with this handle.
    void add_file(std::uint64_t handle, std::shared_ptr<OpenFile> file);
    bool remove_file(std::uint64_t handle);

    // Takes ownership of the data connection. A thread serves the connection until the client closes it or close() is
    // called. start() may be called once.
    void start(Descriptor data_connection);
    // Returns a descriptor that becomes readable when the session has stopped serving.
    int ended_fd() const noexcept { return ended_event_.get(); }
    // Stops serving, destroys the queue pairs and closes the files. Waits for disk I/O in progress. Several threads may
    // call this at the same time, and further calls do nothing.
    void close();

private:
    struct PendingOperation;
    struct Segment;

    // Runs on the thread of the session until the session ends.
    void serve() noexcept;
    // receive_requests, parse_frames, start_segments, poll_completions and send_replies return whether they made any
    // progress.
    bool receive_requests();
    bool parse_frames();
    // Checks the parsed operations and queues them. An invalid or empty operation gets its result at once.
    void enqueue_operations();
    void finish(PendingOperation& pending);
    // Returns 0 if the operation is valid, or -errno.
    std::int64_t check_operation(const Operation& operation, const std::shared_ptr<OpenFile>& file) const;
    bool start_segments();
    PendingOperation& allocate_operation();
    // Starts the next segment of an operation. Returns false if there is no free buffer or no space in the queue pair.
    bool begin_segment(PendingOperation& pending);
    // Reads a segment from the file into its buffer, and adds the transfers to the client.
    void begin_read(Segment& segment);
    bool add_transfers_between_holes(Segment& segment);
    // Adds a transfer of the bytes of a segment from `offset_in_segment` on.
    void add_transfer(Segment& segment, std::size_t offset_in_segment, std::size_t length);
    std::uint32_t allocate_segment();
    void free_segment(Segment& segment);
    bool poll_completions();
    // Ends a transfer. With the last transfer of a segment, ends the segment. With the last segment of an operation,
    // ends the operation.
    void complete_transfer(std::uint32_t segment_index, TransferStatus status);
    // Verifies the checksum that the client gave for a segment, and writes the segment to the file.
    void finish_write(Segment& segment);
    // Moves the unsent results and holes into one frame of the send buffer.
    void append_reply();
    bool send_replies();
    // Sleeps until a request or a completion arrives, replies can be sent, or close() is called.
    void wait_for_events();
    // Sends the last replies after a queue pair has broken.
    void end_with_failure();

    std::shared_ptr<Store> store_;
    std::shared_ptr<Fabric> fabric_;
    const SessionLimits limits_;
    std::optional<QueuePairs> queue_pairs_;
    std::optional<verbs::Staging> staging_;

    std::mutex files_mutex_;
    std::unordered_map<std::uint64_t, std::shared_ptr<OpenFile>> files_;

    Descriptor data_connection_, stop_event_, ended_event_;
    std::thread thread_;
    std::mutex close_mutex_;
    std::atomic<bool> is_stopping_{false};

    // Only the thread of the session uses the members below.
    std::vector<std::byte> receive_buffer_, send_buffer_;
    // The unparsed bytes are [receive_begin_, receive_end_) of receive_buffer_. The unsent bytes are send_buffer_ from
    // send_begin_ on.
    std::size_t receive_begin_ = 0, receive_end_ = 0, send_begin_ = 0;
    // Operations whose segments have not all started, in the order of arrival. Only the first of these operations may
    // have started segments.
    std::deque<PendingOperation*> waiting_operations_;
    // All operation objects. The session reuses them, so that an operation allocates no memory.
    std::vector<std::unique_ptr<PendingOperation>> operation_pool_;
    std::vector<PendingOperation*> free_operations_;
    std::size_t outstanding_count_ = 0; // Operations that have no result yet.
    std::vector<std::unique_ptr<Segment>> segments_;
    std::vector<std::uint32_t> free_segments_; // Indices in segments_.
    std::vector<Result> unsent_results_;
    std::vector<HoleExtent> unsent_holes_;
    std::vector<Operation> parsed_operations_;
    bool has_connection_ended_ = false;
    bool is_rdma_broken_ = false; // A queue pair is broken, so the session ends.
    bool has_refusal_ = false;    // The client's NIC refused a transfer.
};

} // namespace gdrkit::storage
