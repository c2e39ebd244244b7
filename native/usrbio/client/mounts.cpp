// The C functions for mounts: hf3fs_is_hf3fs, hf3fs_extract_mount_point.
#include "usrbio/client/mounts.hpp"

#include "usrbio/client/fuse_ioctl.hpp"
#include "usrbio/include/hf3fs_usrbio.h"

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gdrkit::usrbio {

bool find_agent_mount_above(std::string path, std::string& mount) {
    for (;;) {
        struct stat attributes {};
        if (lstat((path + "/3fs-virt/agent.sock").c_str(), &attributes) == 0) {
            mount = path.empty() ? "/" : path;
            return true;
        }
        const std::size_t slash_index = path.rfind('/');
        if (slash_index == std::string::npos) {
            return false;
        }
        path.resize(slash_index);
    }
}

bool find_agent_mount(int fd, std::string& mount) {
    char link_path[32];
    std::snprintf(link_path, sizeof(link_path), "/proc/self/fd/%d", fd);
    char path[PATH_MAX];
    const ssize_t length = readlink(link_path, path, sizeof(path));
    // For a descriptor of a socket or another object without a path, the target does not begin with a slash
    // ("socket:[1]").
    return length > 0 && path[0] == '/' &&
           find_agent_mount_above(std::string(path, static_cast<std::size_t>(length)), mount);
}

bool is_3fs_file(int fd) noexcept {
    std::uint32_t magic = 0;
    return ioctl(fd, fuse_get_magic, &magic) == 0 && magic == HF3FS_SUPER_MAGIC;
}

namespace {

std::vector<std::string_view> split_words(std::string_view line) {
    std::vector<std::string_view> words;
    while (!line.empty()) {
        const std::size_t word_end = std::min(line.find(' '), line.size());
        if (word_end != 0) {
            words.push_back(line.substr(0, word_end));
        }
        line.remove_prefix(std::min(word_end + 1, line.size()));
    }
    return words;
}

// Decodes the octal escapes (\040) with which /proc/self/mountinfo writes space, tab, newline and backslash.
std::string decode_escapes(std::string_view text) {
    std::string decoded;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '\\' && i + 3 < text.size()) {
            decoded += static_cast<char>((text[i + 1] - '0') << 6 | (text[i + 2] - '0') << 3 | (text[i + 3] - '0'));
            i += 3;
        } else {
            decoded += text[i];
        }
    }
    return decoded;
}

// Returns true if `path` is `folder` or a path below it.
bool is_in_folder(std::string_view path, std::string_view folder) noexcept {
    return path.starts_with(folder) && (folder == "/" || path.size() == folder.size() || path[folder.size()] == '/');
}

// Returns the mount point in a line of /proc/self/mountinfo if the line describes a mount of 3FS that contains `path`;
// otherwise the empty string. The mount point may be the root of 3FS, or only its folder 3fs-virt. In the second case,
// the result is the parent of that folder. With `is_any_type_allowed`, the file system may have another type than
// fuse.hf3fs. The function does not access mounts that do not contain `path`, because their daemons may hang.
std::string match_mount_line(const std::string& line, bool is_any_type_allowed, std::string_view path) {
    const auto words = split_words(line);
    // proc(5): the word with index 4 is the mount point. Optional words begin at index 6 and end with a dash. The type
    // of the file system follows the dash.
    std::size_t dash_index = 6;
    while (dash_index < words.size() && words[dash_index] != "-") {
        ++dash_index;
    }
    if (dash_index + 1 >= words.size() || (!is_any_type_allowed && words[dash_index + 1] != "fuse.hf3fs")) {
        return {};
    }
    std::string mount_point = decode_escapes(words[4]);
    constexpr std::string_view virtual_folder = "/3fs-virt";
    if (mount_point.ends_with(virtual_folder)) {
        mount_point.resize(mount_point.size() - virtual_folder.size());
        mount_point = mount_point.empty() ? "/" : mount_point;
        return is_in_folder(path, mount_point) ? mount_point : std::string();
    }
    struct stat attributes {};
    return is_in_folder(path, mount_point) && stat((mount_point + "/3fs-virt").c_str(), &attributes) == 0
               ? mount_point
               : std::string();
}

std::string find_mount_point(const char* path) {
    const std::unique_ptr<char, decltype(&std::free)> resolved_path(realpath(path, nullptr), std::free);
    if (resolved_path == nullptr) {
        return {};
    }
    const char* any_type_setting = std::getenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP");
    const bool is_any_type_allowed = any_type_setting != nullptr && std::strcmp(any_type_setting, "yes") == 0;
    std::string innermost_mount;
    find_agent_mount_above(resolved_path.get(), innermost_mount);
    std::ifstream mount_info("/proc/self/mountinfo");
    for (std::string line; std::getline(mount_info, line);) {
        const std::string mount = match_mount_line(line, is_any_type_allowed, resolved_path.get());
        if (mount.size() > innermost_mount.size()) {
            innermost_mount = mount;
        }
    }
    return innermost_mount;
}

} // namespace

} // namespace gdrkit::usrbio

using namespace gdrkit::usrbio;

extern "C" {

bool hf3fs_is_hf3fs(int fd) {
    try {
        std::string mount;
        return is_3fs_file(fd) || find_agent_mount(fd, mount);
    } catch (const std::exception&) {
        return false;
    }
}

int hf3fs_extract_mount_point(char* mount_point, int size, const char* path) {
    if (path == nullptr || size < 0 || (size > 0 && mount_point == nullptr)) {
        return -1;
    }
    try {
        const std::string mount = find_mount_point(path);
        if (mount.empty()) {
            return -1;
        }
        if (mount.size() < static_cast<std::size_t>(size)) {
            std::memcpy(mount_point, mount.c_str(), mount.size() + 1);
        }
        return static_cast<int>(mount.size()) + 1;
    } catch (const std::exception&) {
        return -1;
    }
}

} // extern "C"
