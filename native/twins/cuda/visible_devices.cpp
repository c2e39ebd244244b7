// Evaluates CUDA_VISIBLE_DEVICES as driver 580 does on an H200.

#include "cuda/visible_devices.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <string>

#include "model/config.hpp"
#include "model/gpu.hpp"

namespace gdrkit::twin::cuda {
namespace {

constexpr std::string_view uuid_prefix = "GPU-";

// Return the number at the start of a text, or nullopt if the text does not begin with a number. Like the driver, keep
// the low 32 bits of the number, and ignore the text after the number.
std::optional<int> parse_leading_number(std::string_view text) {
    const std::string copy(text);
    char* end = nullptr;
    const long number = std::strtol(copy.c_str(), &end, 10);
    return end == copy.c_str() ? std::nullopt : std::optional(static_cast<int>(number));
}

// Return the hexadecimal digits of a UUID, in lower case and without hyphens, up to the first other character.
std::string parse_leading_hex_digits(std::string_view text) {
    std::string digits;
    for (const char character : text) {
        if (std::isxdigit(static_cast<unsigned char>(character)) != 0) {
            digits += static_cast<char>(std::tolower(static_cast<unsigned char>(character)));
        } else if (character != '-') {
            break;
        }
    }
    return digits;
}

std::string format_hex_digits(const Uuid& uuid) {
    constexpr char hex_digits[] = "0123456789abcdef";
    std::string digits;
    for (const char byte : uuid.bytes) {
        digits += hex_digits[static_cast<unsigned char>(byte) >> 4];
        digits += hex_digits[static_cast<unsigned char>(byte) & 0xf];
    }
    return digits;
}

// Return the physical number of the device whose UUID begins with the digits of the text, or nullopt if no device or
// more than one device matches.
std::optional<int> find_physical_number_by_uuid(std::string_view text, const std::vector<Uuid>& uuids) {
    if (!text.starts_with(uuid_prefix)) {
        return std::nullopt;
    }
    const std::string digits = parse_leading_hex_digits(text.substr(uuid_prefix.size()));
    std::optional<int> matching_number;
    for (std::size_t physical_number = 0; physical_number < uuids.size() && !digits.empty(); ++physical_number) {
        if (format_hex_digits(uuids[physical_number]).starts_with(digits)) {
            if (matching_number) {
                return std::nullopt;
            }
            matching_number = static_cast<int>(physical_number);
        }
    }
    return matching_number;
}

std::vector<Uuid> list_machine_uuids() {
    std::vector<Uuid> uuids;
    for (unsigned physical_number = 0; physical_number < config().gpu_count; ++physical_number) {
        uuids.push_back(get_uuid_of_physical_device(static_cast<int>(physical_number)));
    }
    return uuids;
}

VisibleDevices read_visible_devices() {
    const std::vector<Uuid> uuids = list_machine_uuids();
    if (const char* const value = std::getenv("CUDA_VISIBLE_DEVICES"); value != nullptr) {
        return select_devices(value, uuids);
    }
    VisibleDevices all_devices{uuids.empty() ? no_device : success, {}};
    for (std::size_t physical_number = 0; physical_number < uuids.size(); ++physical_number) {
        all_devices.physical_numbers.push_back(static_cast<int>(physical_number));
    }
    return all_devices;
}

} // namespace

Uuid get_uuid_of_physical_device(int physical_number) {
    const GpuUuid bytes = make_gpu_uuid(physical_number);
    Uuid uuid{};
    std::memcpy(uuid.bytes, bytes.data(), sizeof uuid.bytes);
    return uuid;
}

VisibleDevices select_devices(std::string_view value, const std::vector<Uuid>& uuids) {
    VisibleDevices selected;
    // The first entry decides whether the entries are numbers or UUIDs. Like the driver, ignore the first entry that
    // does not name a device, and all entries after it. Refuse a list that names a device twice.
    const bool has_uuids = value.starts_with(uuid_prefix);
    std::string_view remaining_entries = value;
    for (bool is_last = false; !is_last;) {
        const auto comma = remaining_entries.find(',');
        const std::string_view entry = remaining_entries.substr(0, comma);
        is_last = comma == std::string_view::npos;
        remaining_entries.remove_prefix(is_last ? remaining_entries.size() : comma + 1);
        const std::optional<int> physical_number =
            has_uuids ? find_physical_number_by_uuid(entry, uuids) : parse_leading_number(entry);
        if (!physical_number || *physical_number < 0 || *physical_number >= static_cast<int>(uuids.size())) {
            break;
        }
        if (std::ranges::find(selected.physical_numbers, *physical_number) != selected.physical_numbers.end()) {
            return {invalid_device, {}};
        }
        selected.physical_numbers.push_back(*physical_number);
    }
    selected.init_result = selected.physical_numbers.empty() ? no_device : success;
    return selected;
}

const VisibleDevices& visible_devices() {
    // The object is never destroyed, because threads of the twin may read it while the process exits.
    static const auto* const selection = new VisibleDevices(read_visible_devices());
    return *selection;
}

int get_physical_number(Device device) {
    return visible_devices().physical_numbers.at(static_cast<std::size_t>(device));
}

std::optional<Device> find_ordinal(int physical_number) {
    const auto& physical_numbers = visible_devices().physical_numbers;
    const auto entry = std::ranges::find(physical_numbers, physical_number);
    return entry == physical_numbers.end() ? std::nullopt
                                           : std::optional(static_cast<Device>(entry - physical_numbers.begin()));
}

} // namespace gdrkit::twin::cuda
