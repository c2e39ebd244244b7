// Names of publications and of their shared memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace gdrkit::usrbio {

using Uuid = std::array<std::uint8_t, 16>;

// Of version 4.
Uuid random_uuid() noexcept;
// The 36 characters of it.
std::string to_string(const Uuid& id);

struct RingAttributes {
    bool for_read;
    int io_depth;
    int priority;
    int timeout_ms;
    std::uint64_t flags;
};

// Flags as a link's name has them: base 2, the highest bit that is set first.
std::string flag_digits(std::uint64_t flags);
// `<uuid>[.b<block>][.r|w<io_depth>][.ph|.pl][.t<ms>][.f<flags base 2>]`; ring: null for memory that is no ring.
std::string link_name(const Uuid& id, std::size_t block_size, const RingAttributes* ring);
// As shm_open wants it.
std::string shared_memory_name(const Uuid& id);
// Where the link of a publication is.
std::string link_path(const char* mount, const std::string& name);

inline constexpr char shared_memory_folder[] = "/dev/shm";

} // namespace gdrkit::usrbio
