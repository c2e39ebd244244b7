// Formats the names of publications (symbolic links) and of their shared memory, and makes random UUIDs.
#include "usrbio/client/names.hpp"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstdlib>

namespace gdrkit::usrbio {

namespace {

// Returns the flags in base 2 without leading zeros. The name of a ring contains them in this form.
std::string format_binary(std::uint64_t flags) {
    std::string digits;
    for (int bit_index = std::bit_width(flags) - 1; bit_index >= 0; --bit_index) {
        digits += (flags >> bit_index & 1) != 0 ? '1' : '0';
    }
    return digits;
}

} // namespace

Uuid make_random_uuid() noexcept {
    Uuid id;
    // getrandom returns all 16 bytes or fails. Apart from EINTR, it fails only in kernels without this system call.
    while (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
        if (errno != EINTR) {
            std::abort();
        }
    }
    // Set the version (4) and the variant of RFC 9562.
    id[6] = static_cast<std::uint8_t>((id[6] & 0x0f) | 0x40);
    id[8] = static_cast<std::uint8_t>((id[8] & 0x3f) | 0x80);
    return id;
}

std::string to_string(const Uuid& id) {
    static constexpr char hex_digits[] = "0123456789abcdef";
    std::string text;
    text.reserve(36);
    for (std::size_t i = 0; i < id.size(); ++i) {
        if (i == 4 || i == 6 || i == 8 || i == 10) {
            text += '-';
        }
        text += hex_digits[id[i] >> 4];
        text += hex_digits[id[i] & 15];
    }
    return text;
}

std::string make_link_name(const Uuid& id, std::size_t block_size, const RingAttributes* ring_attributes) {
    std::string name = to_string(id);
    if (block_size != 0) {
        name += ".b" + std::to_string(block_size);
    }
    if (ring_attributes != nullptr) {
        name += (ring_attributes->for_read ? ".r" : ".w") + std::to_string(ring_attributes->io_depth);
        if (ring_attributes->priority != 0) {
            name += ring_attributes->priority < 0 ? ".ph" : ".pl";
        }
        name += ".t" + std::to_string(ring_attributes->timeout_ms);
        if (ring_attributes->flags != 0) {
            name += ".f" + format_binary(ring_attributes->flags);
        }
    }
    return name;
}

std::string make_shared_memory_name(const Uuid& id) {
    return "/hf3fs-iov-" + to_string(id);
}

std::string make_link_path(const char* mount, const std::string& name) {
    return std::string(mount) + "/3fs-virt/iovs/" + name;
}

} // namespace gdrkit::usrbio
