// Formats and strictly parses the name and the target of the link of a GPU iov.
#include "usrbio/client/gpu_target.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

namespace gdrkit::usrbio {
namespace {

constexpr std::string_view hex_digits = "0123456789abcdef";

void append_hex(std::string& text, std::uint8_t byte) {
    text += hex_digits[byte >> 4];
    text += hex_digits[byte & 0xf];
}

// Removes `prefix` from the beginning of the text. Returns false if the text does not begin with `prefix`.
bool consume_prefix(std::string_view& text, std::string_view prefix) {
    if (!text.starts_with(prefix)) {
        return false;
    }
    text.remove_prefix(prefix.size());
    return true;
}

// Removes a decimal number without sign, blank or leading zero from the beginning of the text. Returns false if the
// text begins with something else.
template <typename Number> bool consume_number(std::string_view& text, Number& number) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, 10);
    const auto length = static_cast<std::size_t>(end - text.data());
    if (error != std::errc{} || text.front() == '-' || (length > 1 && text.front() == '0')) {
        return false;
    }
    text.remove_prefix(length);
    return true;
}

// Removes two hexadecimal digits from the beginning of the text. Accepts only lower case, so that a target has only one
// spelling. Returns false if the text begins with something else.
bool consume_hex_byte(std::string_view& text, std::uint8_t& byte) {
    if (text.size() < 2) {
        return false;
    }
    const auto high_digit = hex_digits.find(text[0]), low_digit = hex_digits.find(text[1]);
    if (high_digit == std::string_view::npos || low_digit == std::string_view::npos) {
        return false;
    }
    byte = static_cast<std::uint8_t>(high_digit << 4 | low_digit);
    text.remove_prefix(2);
    return true;
}

// Returns whether the text of a UUID (8-4-4-4-12 digits) has a hyphen before the digits of this byte.
bool has_hyphen_before(std::size_t byte_index) {
    return byte_index == 4 || byte_index == 6 || byte_index == 8 || byte_index == 10;
}

} // namespace

std::string format_target(const GpuTarget& target) {
    std::string text = "gdr://v2/device/" + std::to_string(target.device) + "/allocation/" +
                       std::to_string(target.allocation_bytes) + "/offset/" + std::to_string(target.offset_bytes) +
                       "/size/" + std::to_string(target.size_bytes);
    if (!target.ipc) {
        return text + "/dmabuf";
    }
    text += "/ipc/";
    for (const std::uint8_t byte : *target.ipc) {
        append_hex(text, byte);
    }
    return text;
}

std::optional<GpuTarget> parse_target(std::string_view text) {
    GpuTarget target;
    if (!consume_prefix(text, "gdr://v2/device/") || !consume_number(text, target.device) ||
        !consume_prefix(text, "/allocation/") || !consume_number(text, target.allocation_bytes) ||
        !consume_prefix(text, "/offset/") || !consume_number(text, target.offset_bytes) ||
        !consume_prefix(text, "/size/") || !consume_number(text, target.size_bytes)) {
        return std::nullopt;
    }
    if (consume_prefix(text, "/ipc/")) {
        target.ipc.emplace();
        if (!std::ranges::all_of(*target.ipc, [&](std::uint8_t& byte) { return consume_hex_byte(text, byte); })) {
            return std::nullopt;
        }
    } else if (!consume_prefix(text, "/dmabuf")) {
        return std::nullopt;
    }
    constexpr std::uint64_t size_max = std::numeric_limits<std::int64_t>::max();
    const bool are_sizes_valid = target.allocation_bytes <= size_max &&
                                 target.offset_bytes <= target.allocation_bytes && target.size_bytes != 0 &&
                                 target.size_bytes <= target.allocation_bytes - target.offset_bytes;
    const bool is_ipc_handle_zero = target.ipc && std::ranges::count(*target.ipc, 0) == 64;
    return text.empty() && are_sizes_valid && !is_ipc_handle_zero ? std::optional(target) : std::nullopt;
}

std::string make_gpu_link_name(const std::uint8_t id[16], int device) {
    std::string name;
    for (std::size_t index = 0; index < 16; ++index) {
        if (has_hyphen_before(index)) {
            name += '-';
        }
        append_hex(name, id[index]);
    }
    return name + ".gdr.d" + std::to_string(device);
}

std::optional<GpuLinkName> parse_gpu_link_name(std::string_view name) {
    GpuLinkName link_name;
    std::string_view remaining_text = name;
    for (std::size_t index = 0; index < link_name.id.size(); ++index) {
        if ((has_hyphen_before(index) && !consume_prefix(remaining_text, "-")) ||
            !consume_hex_byte(remaining_text, link_name.id[index])) {
            return std::nullopt;
        }
    }
    const bool is_valid = consume_prefix(remaining_text, ".gdr.d") &&
                          consume_number(remaining_text, link_name.owner_device) && remaining_text.empty();
    return is_valid ? std::optional(link_name) : std::nullopt;
}

} // namespace gdrkit::usrbio
