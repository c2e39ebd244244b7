// Size of a page of this host, in bytes: 4 KiB on x86, 64 KiB on many arm64 machines (Grace).
#pragma once

#include <unistd.h>

#include <cstdint>

namespace gdrkit::usrbio {

inline std::uint64_t host_page_bytes() noexcept {
    static const auto bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

} // namespace gdrkit::usrbio
