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

// The attributes of a ring, which the name of its publication contains. hf3fs_usrbio.h describes them.
struct RingAttributes {
    bool for_read;
    int io_depth;
    int priority; // < 0: high, 0: normal, > 0: low
    int timeout_ms;
    std::uint64_t flags;
};

// Returns `<uuid>[.b<block size>]` and, for a ring, `.r<io_depth>` (reads) or `.w<io_depth>` (writes), then
// `[.ph|.pl].t<timeout in ms>[.f<flags in base 2>]`. `ring_attributes` is null if the memory is for data.
std::string make_link_name(const Uuid& id, std::size_t block_size, const RingAttributes* ring_attributes);
// Returns the name of the shared memory for shm_open.
std::string make_shared_memory_name(const Uuid& id);
// Returns the path of the link of a publication.
std::string make_link_path(const char* mount, const std::string& name);

inline constexpr char shared_memory_folder[] = "/dev/shm";

} // namespace gdrkit::usrbio
