// A worker thread of the engine: it moves pieces of jobs through its own staging buffers.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "engine/haul.hpp"
#include "engine/job.hpp"
#include "engine/lane.hpp"
#include "engine/staging.hpp"

namespace gdrkit::engine {

// The source of a worker's pieces, and the way to wake other workers.
class Dispatcher {
public:
    virtual Taken next(Piece& piece, bool wait) = 0;
    virtual void let_others_go_on() = 0;
    // Publishes a coalesced copy; null if none was opened. Then other workers may open one again.
    virtual void share(std::shared_ptr<Haul> haul) = 0;

protected:
    ~Dispatcher() = default;
};

// Returns the size of the staging memory of one worker, in bytes.
std::size_t slab_bytes_of(const Tuning& tuning);

class Pump {
public:
    Pump(Dispatcher& dispatcher, Contexts& contexts, Staging& staging, Hauls& hauls, std::byte* slab,
         const Tuning& tuning);

    // Runs until the dispatcher has no more work and is closing.
    void run();

private:
    struct Slot {
        Piece piece;
        Lane* lane = nullptr;
        std::uint64_t direct_bytes = 0;
        bool pending = false;
    };

    // Returns whether the piece fills the whole slab, whose buffers must then be empty.
    bool is_wide(const Piece& piece) const noexcept { return piece.bytes > tuning_.piece_bytes; }
    Taken take(Piece& piece);
    bool is_free() const noexcept;
    void open_haul(Piece& piece);
    bool retire_haul();
    void begin(std::size_t index, Piece& piece);
    void begin_read(std::size_t index, Lane& lane);
    void begin_write(std::size_t index, Lane& lane);
    void retire(std::size_t index);
    bool retire_oldest();
    void host_piece(Piece& piece);
    Lane& lane_of(int device);
    void lay_out(Piece& piece);
    bool wants_direct(const Piece& piece, const Part& part);
    Moved read_part(const Piece& piece, const Part& part, std::byte* base);
    Moved write_part(const Piece& piece, const Part& part, const std::byte* base);
    std::uint64_t write_file(Piece& piece, const std::byte* base);
    void give_up(Piece& piece, const Failure& failure);
    void finish(Piece& piece, std::uint64_t direct_bytes);
    void release(Piece& piece);
    std::byte* base_of(std::size_t index, const Piece& piece) const;

    Dispatcher& dispatcher_;
    Contexts& contexts_;
    Staging& staging_;
    Hauls& hauls_;
    std::byte* const slab_;
    const Tuning tuning_;
    std::vector<Slot> slots_;
    std::size_t next_ = 0;      // The buffer for the next piece; the pending ones are before it.
    std::size_t pending_ = 0;   // Number of pending buffers.
    std::shared_ptr<Job> kept_; // The job whose disk was read last; its place among the readers is kept.
    Lane* current_ = nullptr;
    std::map<int, std::unique_ptr<Lane>> lanes_;
};

} // namespace gdrkit::engine
