// Names of publications (which are the names of their symbolic links) and of their shared memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace gdrkit::usrbio {

using Uuid = std::array<std::uint8_t, 16>;

// Returns a random UUID (version 4).
Uuid make_random_uuid() noexcept;
// Returns the 36 characters of a UUID.
std::string to_string(const Uuid& id);

struct RingAttributes {
    bool for_read;
    int io_depth;
    int priority;
    int timeout_ms;
    std::uint64_t flags;
};

// Returns `<uuid>[.b<block>][.r|w<io_depth>][.ph|.pl][.t<ms>][.f<flags base 2>]`. `ring` is null for data.
std::string make_link_name(const Uuid& id, std::size_t block_size, const RingAttributes* ring);
// Returns the name of the shared memory for shm_open.
std::string make_shared_memory_name(const Uuid& id);
// Returns the path of the link of a publication.
std::string make_link_path(const char* mount, const std::string& name);

inline constexpr char shared_memory_folder[] = "/dev/shm";

} // namespace gdrkit::usrbio
