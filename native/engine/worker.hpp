// A worker thread of the copy engine. It moves chunks of jobs through its slab, which is its part of the staging
// memory. The slab is divided into buffers, so that the device copies one buffer while the worker reads into the next.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "engine/coalesced_copy.hpp"
#include "engine/copy_stream.hpp"
#include "engine/job.hpp"
#include "engine/staging.hpp"

namespace gdrkit::engine {

// The interface by which a worker takes chunks and wakes other workers.
class Dispatcher {
public:
    // Takes work for the calling worker. Waits for work if `may_wait` is set.
    virtual TakeResult take_work(Chunk& chunk, bool may_wait) = 0;
    // Wakes another worker. A worker calls this function when it has made work available that it does not take itself.
    virtual void wake_another_worker() = 0;
    // Lets other workers fill a coalesced copy, and open the next copy. `copy` is null if the coalesced copy could not
    // be opened.
    virtual void publish(std::shared_ptr<CoalescedCopy> copy) = 0;

protected:
    ~Dispatcher() = default;
};

// Returns the size of the slab of one worker, in bytes.
std::size_t slab_bytes_of(const Tuning& tuning);

class Worker {
public:
    Worker(Dispatcher& dispatcher, PrimaryContexts& contexts, Staging& staging, CoalescedCopies& coalesced_copies,
           std::byte* slab, const Tuning& tuning);

    // Runs until the dispatcher has no more work and is closing.
    void run();

private:
    // A staging buffer is pending while the device copies the bytes of its chunk.
    struct Buffer {
        Chunk chunk;
        CopyStream* stream = nullptr;
        std::uint64_t direct_bytes = 0; // Bytes of the chunk that O_DIRECT moved.
        bool is_pending = false;
    };

    // Consecutive parts of a chunk that also follow each other in one file.
    struct FileRun {
        std::size_t parts_count;
        std::uint64_t length;
    };

    // Returns whether the chunk is larger than a buffer. It then uses the whole slab, so no buffer may be pending.
    bool fills_slab(const Chunk& chunk) const noexcept { return chunk.bytes > tuning_.chunk_bytes; }
    TakeResult take(Chunk& chunk);
    bool is_idle() const noexcept;
    void open_coalesced(Chunk& chunk);
    bool complete_coalesced();
    // Reads a chunk into a staging buffer and queues its copy to the device. For a write, queues the copy from the
    // device. The buffer is pending afterwards. A chunk of host memory is moved at once.
    void start_chunk(std::size_t buffer_index, Chunk& chunk);
    void start_read(std::size_t buffer_index, CopyStream& stream);
    void start_write(std::size_t buffer_index, CopyStream& stream);
    // Waits for the copy of a pending buffer. For a write, writes its bytes to the files. Completes the chunk.
    void complete_buffer(std::size_t buffer_index);
    // Completes the oldest pending buffer. Returns false if no buffer is pending.
    bool complete_oldest();
    void move_host_chunk(Chunk& chunk);
    // Returns the stream for a device and makes its context current. Creates the stream at the first use.
    CopyStream& activate_stream(int device);
    void assign_staging_offsets(Chunk& chunk);
    static FileRun find_run_at(const Chunk& chunk, std::size_t first_index);
    static bool distribute_result(Chunk& chunk, std::size_t first_index, const FileRun& run, const IoResult& result);
    bool wants_direct(const Chunk& chunk, const Part& part, std::uint64_t length);
    // read_run() and write_run() move `length` bytes of the file: a part and the parts that follow it in its run.
    // `base` is the beginning of the staging memory of the chunk, or of a part that is not staged.
    IoResult read_run(const Chunk& chunk, const Part& part, std::uint64_t length, std::byte* base);
    IoResult write_run(const Chunk& chunk, const Part& part, std::uint64_t length, const std::byte* base);
    // Writes the staged bytes of a chunk to its files. Returns how many bytes were written with O_DIRECT.
    std::uint64_t write_parts(Chunk& chunk, const std::byte* base);
    void fail_chunk(Chunk& chunk, const Failure& failure);
    void complete_chunk(Chunk& chunk, std::uint64_t direct_bytes);
    void release_reservation(Chunk& chunk);
    // Returns the staging memory of a chunk in this buffer.
    std::byte* memory_of(std::size_t buffer_index, const Chunk& chunk) const;

    Dispatcher& dispatcher_;
    PrimaryContexts& contexts_;
    Staging& staging_;
    CoalescedCopies& coalesced_copies_;
    std::byte* const slab_;
    const Tuning tuning_;
    std::vector<Buffer> buffers_;
    // Index of the buffer for the next chunk. The buffers form a ring, in which the pending buffers precede this
    // buffer.
    std::size_t next_buffer_index_ = 0;
    std::size_t pending_buffers_count_ = 0;
    // The job of the last read from a disk, whose reservation this worker still has.
    std::shared_ptr<Job> reserved_job_;
    CopyStream* current_stream_ = nullptr; // The stream whose context is current on this thread, or null if unknown.
    std::map<int, std::unique_ptr<CopyStream>> streams_; // The keys are the devices.
};

} // namespace gdrkit::engine
