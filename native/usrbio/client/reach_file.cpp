// Reads the file in which gdrkit records which NICs reach which GPUs (gdrkit/registration/reach_table.py).
#include "usrbio/client/reach_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "common/descriptor.hpp"
#include "usrbio/client/log.hpp"

namespace gdrkit::usrbio {
namespace {

// The writer keeps the file below this size.
constexpr std::size_t file_bytes_max = 64U << 10;

std::string make_file_path() {
    const char* const folder = std::getenv("GDRKIT_STATE");
    return (folder != nullptr && *folder != '\0' ? std::string(folder)
                                                 : "/dev/shm/gdrkit-" + std::to_string(geteuid())) +
           "/reach";
}

// Returns the contents of the file, or an empty text if the file cannot be read. Also returns an empty text if the file
// belongs to another user, or another user can write to it: such contents are not trusted.
std::string read_file(const std::string& path) {
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat attributes {};
    if (!file || fstat(file.get(), &attributes) != 0 || !S_ISREG(attributes.st_mode) ||
        attributes.st_uid != geteuid() || (attributes.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        return {};
    }
    std::string text(file_bytes_max, '\0');
    std::size_t length = 0;
    while (length < text.size()) {
        const ssize_t read_bytes = read(file.get(), text.data() + length, text.size() - length);
        if (read_bytes <= 0) {
            break;
        }
        length += static_cast<std::size_t>(read_bytes);
    }
    text.resize(length);
    return text;
}

// Returns the UUID as the CUDA tools print it, GPU-00112233-4455-6677-8899-aabbccddeeff.
std::string format_uuid(const cuda::Uuid& uuid) {
    std::string text = "GPU-";
    for (std::size_t index = 0; index < sizeof uuid.bytes; ++index) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", unsigned{uuid.bytes[index]});
        text += digits;
        text += index == 3 || index == 5 || index == 7 || index == 9 ? "-" : "";
    }
    return text;
}

} // namespace

bool is_reached_by_nic(const cuda::Uuid& uuid) {
    const std::string path = make_file_path(), text = read_file(path), line_prefix = "gpu=" + format_uuid(uuid) + ' ';
    if (!text.starts_with("gdrkit-reach 1\n")) {
        log_line(LogLevel::info, "%s has no measurement of NICs; start the agent, or run `gdrkit reach`", path.c_str());
        return false;
    }
    // Each line after the first describes one measurement: gpu=<UUID> pci=<address> nic=<name> ... moved=yes|no ...
    std::string_view remaining_text = text;
    while (!remaining_text.empty()) {
        const std::string_view line = remaining_text.substr(0, remaining_text.find('\n'));
        if (line.starts_with(line_prefix) && line.find(" moved=yes ") != std::string_view::npos) {
            return true;
        }
        remaining_text.remove_prefix(line.size() < remaining_text.size() ? line.size() + 1 : line.size());
    }
    return false;
}

} // namespace gdrkit::usrbio
