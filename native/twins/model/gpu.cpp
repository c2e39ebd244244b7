// The GPUs of the emulated machine: UUIDs and PCI addresses.

#include "model/gpu.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>

#include "model/config.hpp"

namespace gdrkit::twin {
namespace {

// Parse the hexadecimal number before the separator, and remove the number and the separator from the text. If the
// separator is 0, the whole text is the number. Return false if there is no separator or no valid number.
bool parse_hex_field(std::string_view* text, char separator, int* value) {
    const auto end = separator == 0 ? text->size() : text->find(separator);
    if (end == std::string_view::npos) {
        return false;
    }
    const auto [parsed_end, error] = std::from_chars(text->data(), text->data() + end, *value, 16);
    const bool is_number = error == std::errc{} && parsed_end == text->data() + end && *value >= 0;
    text->remove_prefix(std::min(end + 1, text->size()));
    return is_number;
}

} // namespace

GpuUuid make_gpu_uuid(int number) {
    const std::string text = config().domain + "/" + std::to_string(number);
    GpuUuid uuid{};
    constexpr std::uint64_t fnv_offset_basis = 0xcbf29ce484222325, fnv_prime = 0x100000001b3; // of 64-bit FNV-1a
    std::uint64_t hash = fnv_offset_basis;
    for (std::size_t offset = 0; offset < uuid.size(); offset += sizeof hash) {
        for (const char letter : text) {
            hash = (hash ^ static_cast<unsigned char>(letter)) * fnv_prime;
        }
        std::memcpy(uuid.data() + offset, &hash, sizeof hash);
    }
    return uuid;
}

std::optional<int> parse_pci_bus(std::string_view text) {
    int domain = 0, bus = 0, slot = 0, function = 0;
    const bool has_domain = std::ranges::count(text, ':') == 2;
    if (has_domain && !parse_hex_field(&text, ':', &domain)) {
        return std::nullopt;
    }
    if (!parse_hex_field(&text, ':', &bus)) {
        return std::nullopt;
    }
    const bool has_function = text.find('.') != std::string_view::npos;
    const bool is_parsed = has_function ? parse_hex_field(&text, '.', &slot) && parse_hex_field(&text, 0, &function)
                                        : parse_hex_field(&text, 0, &slot);
    if (!is_parsed || (!has_domain && !has_function)) {
        return std::nullopt;
    }
    return domain == 0 && slot == 0 && function == 0 ? bus : no_pci_bus;
}

} // namespace gdrkit::twin
