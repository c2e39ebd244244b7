// The memory of a ring, shared by an application and an agent: what 3FS has, and gdrkit's extension in its spare bytes.
#pragma once

#include "usrbio/ring/semaphore.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio {

// The order in the memory: Indices, Arguments[n], Completion[n], Submission[n], Semaphore (sem_t), spare bytes; n =
// entries + 1.
struct Indices {
    std::atomic<std::int32_t> submission_head; // Written by the application.
    std::atomic<std::int32_t> submission_tail; // Written by the agent.
    std::atomic<std::int32_t> completion_head; // Written by the agent.
    std::atomic<std::int32_t> completion_tail; // Written by the application.
};
static_assert(sizeof(Indices) == 16 && std::atomic<std::int32_t>::is_always_lock_free);

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
    std::int32_t index;
    std::int32_t reserved;
    std::int64_t result;
    std::uint64_t userdata;
};
static_assert(sizeof(Completion) == 24 && offsetof(Completion, result) == 8 && offsetof(Completion, userdata) == 16);

struct Submission {
    std::int32_t index;
    std::int32_t reserved;
    std::uint64_t userdata;
};
static_assert(sizeof(Submission) == 16 && offsetof(Submission, userdata) == 8);

inline constexpr std::size_t spare_bytes = 4096;

constexpr std::size_t ring_bytes(std::size_t entries) noexcept {
    return sizeof(Indices) + sizeof(Semaphore) +
           (sizeof(Arguments) + sizeof(Completion) + sizeof(Submission)) * (entries + 1) + spare_bytes;
}

// What a side says of its sleep.
inline constexpr std::uint32_t sleeps_not = 0;    // It looks by itself.
inline constexpr std::uint32_t sleeps_once = 1;   // Wake it by its semaphore, and store sleeps_not.
inline constexpr std::uint32_t sleeps_always = 2; // Post its semaphore for all that is published, and leave this.

// Each side writes its own cache line, but who wakes a side that sleeps once takes that back, so that one sleep is one
// post. Zero everywhere is a side that does not know the extension.
struct alignas(64) SideState {
    std::atomic<std::uint32_t> magic;    // extension_magic as soon as this side speaks the extension.
    std::atomic<std::uint32_t> sleeping; // One of the three above.
    std::atomic<std::uint32_t> ended;    // 1: this side is through with the ring; nothing more comes from it.
};
struct Extension {
    SideState application;
    SideState agent;
};
static_assert(sizeof(Extension) == 128);

inline constexpr std::uint32_t extension_magic = 0x31524447; // "GDR1" in memory.

// The extension lies at the first multiple of 64 behind the completion semaphore, counted from the begin of the ring.
constexpr std::size_t extension_offset(std::size_t entries) noexcept {
    const std::size_t end = ring_bytes(entries) - spare_bytes;
    return (end + 63) / 64 * 64;
}

} // namespace gdrkit::usrbio
