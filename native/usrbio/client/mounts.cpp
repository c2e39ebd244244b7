// hf3fs_is_hf3fs, hf3fs_extract_mount_point.
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

bool agent_mount_above(std::string path, std::string& mount) {
    for (;;) {
        struct stat found {};
        if (lstat((path + "/3fs-virt/agent.sock").c_str(), &found) == 0) {
            mount = path.empty() ? "/" : path;
            return true;
        }
        const std::size_t slash = path.rfind('/');
        if (slash == std::string::npos) {
            return false;
        }
        path.resize(slash);
    }
}

bool agent_mount_of(int fd, std::string& mount) {
    char link[32];
    std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    char path[PATH_MAX];
    const ssize_t length = readlink(link, path, sizeof(path));
    // What is no file of a file system has a name like "socket:[1]".
    return length > 0 && path[0] == '/' &&
           agent_mount_above(std::string(path, static_cast<std::size_t>(length)), mount);
}

bool answers_as_3fs(int fd) noexcept {
    std::uint32_t magic = 0;
    return ioctl(fd, fuse_get_magic, &magic) == 0 && magic == HF3FS_SUPER_MAGIC;
}

namespace {

std::vector<std::string_view> words_of(std::string_view line) {
    std::vector<std::string_view> words;
    while (!line.empty()) {
        const std::size_t end = std::min(line.find(' '), line.size());
        if (end != 0) {
            words.push_back(line.substr(0, end));
        }
        line.remove_prefix(std::min(end + 1, line.size()));
    }
    return words;
}

// mountinfo writes space, tab, newline and backslash as three octal digits.
std::string unescaped(std::string_view text) {
    std::string plain;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '\\' && i + 3 < text.size()) {
            plain += static_cast<char>((text[i + 1] - '0') << 6 | (text[i + 2] - '0') << 3 | (text[i + 3] - '0'));
            i += 3;
        } else {
            plain += text[i];
        }
    }
    return plain;
}

// Is `path` the folder, or below it?
bool is_below(std::string_view path, std::string_view folder) noexcept {
    return path.starts_with(folder) && (folder == "/" || path.size() == folder.size() || path[folder.size()] == '/');
}

// The whole of 3FS may be mounted, or 3fs-virt and other parts of it each by themselves. Of mounts that the path is not
// in, nothing is asked: their daemons may hang.
std::string mount_of_line(const std::string& line, bool any_type, std::string_view path) {
    const auto words = words_of(line);
    std::size_t dash = 6;
    while (dash < words.size() && words[dash] != "-") {
        ++dash;
    }
    if (dash + 1 >= words.size() || (!any_type && words[dash + 1] != "fuse.hf3fs")) {
        return {};
    }
    std::string place = unescaped(words[4]);
    constexpr std::string_view virtual_folder = "/3fs-virt";
    if (place.ends_with(virtual_folder)) {
        place.resize(place.size() - virtual_folder.size());
        place = place.empty() ? "/" : place;
        return is_below(path, place) ? place : std::string();
    }
    struct stat found {};
    return is_below(path, place) && stat((place + "/3fs-virt").c_str(), &found) == 0 ? place : std::string();
}

std::string mount_point_of(const char* path) {
    const std::unique_ptr<char, decltype(&std::free)> real(realpath(path, nullptr), std::free);
    if (real == nullptr) {
        return {};
    }
    const char* unchecked = std::getenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP");
    const bool any_type = unchecked != nullptr && std::strcmp(unchecked, "yes") == 0;
    std::string best;
    agent_mount_above(real.get(), best);
    std::ifstream mounts("/proc/self/mountinfo");
    for (std::string line; std::getline(mounts, line);) {
        const std::string mount = mount_of_line(line, any_type, real.get());
        if (mount.size() > best.size()) {
            best = mount;
        }
    }
    return best;
}

} // namespace

} // namespace gdrkit::usrbio

using namespace gdrkit::usrbio;

extern "C" {

bool hf3fs_is_hf3fs(int fd) {
    try {
        std::string mount;
        return answers_as_3fs(fd) || agent_mount_of(fd, mount);
    } catch (const std::exception&) {
        return false;
    }
}

int hf3fs_extract_mount_point(char* mount_point, int size, const char* path) {
    if (path == nullptr || size < 0 || (size > 0 && mount_point == nullptr)) {
        return -1;
    }
    try {
        const std::string mount = mount_point_of(path);
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
