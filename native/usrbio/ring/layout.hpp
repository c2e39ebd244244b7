// Layout of the memory of a ring, which an application and an agent share. It is the layout of 3FS, with gdrkit's
// extension in the spare bytes at the end.
#pragma once

#include "usrbio/ring/semaphore.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio {

// Order in memory: Indices, Arguments[n], Completion[n], Submission[n], Semaphore (sem_t), spare bytes, where n =
// entries + 1. The submissions and the completions are circular queues. The writer of a queue advances its head, and
// the reader advances its tail. If head and tail are equal, the queue is empty.
struct Indices {
    std::atomic<std::int32_t> submission_head; // Written by the application.
    std::atomic<std::int32_t> submission_tail; // Written by the agent.
    std::atomic<std::int32_t> completion_head; // Written by the agent.
    std::atomic<std::int32_t> completion_tail; // Written by the application.
};
static_assert(sizeof(Indices) == 16 && std::atomic<std::int32_t>::is_always_lock_free);

// The arguments of an operation. The operation's index selects the element of Arguments[n].
struct Arguments {
    std::uint8_t buffer_id[16];
    std::uint64_t buffer_offset;
    std::uint64_t file_inode;
    std::uint64_t file_offset;
    std::uint64_t length;
    std::uint64_t userdata;
};
static_assert(sizeof(Arguments) == 56 && offsetof(Arguments, buffer_offset) == 16 &&
              offsetof(Arguments, userdata) == 48);

struct Completion {
    std::int32_t index; // Index of the operation's element of Arguments[n].
    std::int32_t reserved;
    std::int64_t result; // Number of bytes that were transferred, or -errno.
    std::uint64_t userdata;
};
static_assert(sizeof(Completion) == 24 && offsetof(Completion, result) == 8 && offsetof(Completion, userdata) == 16);

struct Submission {
    std::int32_t index; // Index of the operation's element of Arguments[n].
    std::int32_t reserved;
    std::uint64_t userdata;
};
static_assert(sizeof(Submission) == 16 && offsetof(Submission, userdata) == 8);

inline constexpr std::size_t spare_bytes = 4096; // 3FS allocates these bytes after the semaphore and does not use them.

// Returns the size of a ring in bytes, with the spare bytes.
constexpr std::size_t ring_bytes(std::size_t entries) noexcept {
    return sizeof(Indices) + sizeof(Semaphore) +
           (sizeof(Arguments) + sizeof(Completion) + sizeof(Submission)) * (entries + 1) + spare_bytes;
}

// Values of SideState::sleeping, and what each value tells the other side.
inline constexpr std::uint32_t awake = 0;         // This side polls for work and needs no post.
inline constexpr std::uint32_t asleep_once = 1;   // Post this side's semaphore once, and store `awake`.
inline constexpr std::uint32_t asleep_always = 2; // Post this side's semaphore for every batch, and keep this value.

// Each side has a SideState in a separate cache line, and only that side writes it. There is one exception: when a side
// wakes the other side, it replaces asleep_once by `awake`, so that one sleep costs one post. If all bytes of a
// SideState are zero, that side does not support the extension.
struct alignas(64) SideState {
    std::atomic<std::uint32_t> magic;    // extension_magic if this side supports the extension.
    std::atomic<std::uint32_t> sleeping; // One of the three values above.
    std::atomic<std::uint32_t> ended;    // 1: this side has finished and no longer writes to the ring.
    // Written only by the application: the agent wakes it when the completion queue holds this many completions. 0
    // means 1.
    std::atomic<std::uint32_t> awaited_count;
    // Written only by the application: 1 + the number of the processor on which it last submitted; 0: unknown.
    std::atomic<std::uint32_t> processor;
};
struct Extension {
    SideState application;
    SideState agent;
};
static_assert(sizeof(Extension) == 128);

inline constexpr std::uint32_t extension_magic = 0x31524447; // "GDR1" in memory.

// The extension is at the first multiple of 64 after the completion semaphore, counted from the beginning of the ring.
constexpr std::size_t extension_offset(std::size_t entries) noexcept {
    const std::size_t semaphore_end = ring_bytes(entries) - spare_bytes;
    return (semaphore_end + 63) / 64 * 64;
}

} // namespace gdrkit::usrbio
