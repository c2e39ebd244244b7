// The twins' dma-bufs, implemented by memfds. An allocation is a memfd. A dma-buf of one whole allocation is a
// write-only file descriptor of its memfd. Any other dma-buf is a write-only file descriptor of a placeholder: a memfd
// without content, whose name identifies the exporting process. An importer of a placeholder requests the extents from
// the control service of that process.

#include "model/dmabuf.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

#include "model/config.hpp"

namespace gdrkit::twin {
namespace {

constexpr std::string_view memory_name_prefix = "gdrkit-gpu:";
constexpr std::string_view dmabuf_name_prefix = "gdrkit-dmabuf:";
constexpr std::string_view shareable_name_prefix = "gdrkit-vmm:";
// A dma-buf has at most this number of extents: the control service sends one descriptor for each extent in one
// message, and send_fds sends at most 64.
constexpr std::size_t max_extents = 64;

// The result of reading /proc/self/fd/N. `name` is the memfd's name without the "/memfd:" and " (deleted)" that the
// kernel adds.
struct FdName {
    bool is_open = false;
    bool is_memfd = false;
    std::string name;
};

FdName read_fd_name(int fd) {
    FdName fd_name;
    char link[64], target[256];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t size_bytes = readlink(link, target, sizeof target - 1);
    if (size_bytes < 0) {
        return fd_name;
    }
    fd_name.is_open = true;
    std::string_view text(target, static_cast<std::size_t>(size_bytes));
    constexpr std::string_view prefix = "/memfd:", suffix = " (deleted)";
    if (text.starts_with(prefix) && text.ends_with(suffix)) {
        fd_name.is_memfd = true;
        fd_name.name = text.substr(prefix.size(), text.size() - prefix.size() - suffix.size());
    }
    return fd_name;
}

// Return whether the memfd has exactly the seals that the twins set. A memfd of another library may have a twin's name
// by accident, but is unlikely to have these seals too.
bool has_twin_seals(int fd) {
    constexpr int seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;
    return fcntl(fd, F_GET_SEALS) == seals;
}

int make_memfd(const std::string& name, std::uint64_t length_bytes) {
    Fd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd || ftruncate(fd.get(), static_cast<off_t>(length_bytes)) != 0 ||
        fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return -errno;
    }
    return fd.release();
}

int reopen(int fd, int flags) {
    char link[64];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const int reopened_fd = open(link, flags | O_CLOEXEC);
    return reopened_fd < 0 ? -errno : reopened_fd;
}

std::uint64_t get_file_size(int fd) {
    struct stat status {};
    return fstat(fd, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : 0;
}

// A placeholder that this process exported, with its extents. The export is kept at least as long as any process has
// the placeholder open.
struct PlaceholderExport {
    Fd placeholder;
    std::vector<ImportedDmabuf::OwnedExtent> extents;
};

struct Exports {
    std::mutex mutex;
    std::map<std::uint64_t, PlaceholderExport> placeholders; // by the ids of the dma-bufs
};

Exports& exports() {
    static auto* const instance = new Exports;
    return *instance;
}

// The entry of one extent in the reply to dmabuf_extents_request. The memfd of the extent is passed beside the reply.
struct ExtentMessage {
    std::uint64_t offset_bytes, length_bytes;
};

// Return whether any process has opened this memfd through /proc/self/fd. To find out, open the memfd and request a
// write lease, which the kernel grants only if the file was not opened elsewhere. The descriptor that memfd_create
// returned, and its duplicates, do not count.
bool is_opened_elsewhere(int fd) {
    const Fd writer(reopen(fd, O_RDWR));
    // If a process opens the file while the lease is held, the kernel signals this process. SIGURG is ignored by
    // default; SIGIO, the kernel's choice, would end the process.
    return !writer || fcntl(writer.get(), F_SETSIG, SIGURG) != 0 || fcntl(writer.get(), F_SETLEASE, F_WRLCK) != 0;
}

void drop_unreferenced_exports(Exports* export_table) {
    std::erase_if(export_table->placeholders,
                  [](const auto& entry) { return !is_opened_elsewhere(entry.second.placeholder.get()); });
}

// Handle dmabuf_extents_request, whose body is the id of a placeholder. Leave the reply empty if the id is not known.
void serve_extents(std::span<const std::byte> request, std::vector<std::byte>* reply, std::vector<Fd>* fds) {
    std::uint64_t id = 0;
    if (request.size() != sizeof id) {
        return;
    }
    std::memcpy(&id, request.data(), sizeof id);
    Exports& export_table = exports();
    std::lock_guard lock(export_table.mutex);
    const auto entry = export_table.placeholders.find(id);
    if (entry == export_table.placeholders.end()) {
        return;
    }
    for (const ImportedDmabuf::OwnedExtent& extent : entry->second.extents) {
        const ExtentMessage message{extent.offset_bytes, extent.length_bytes};
        const auto* bytes = reinterpret_cast<const std::byte*>(&message);
        reply->insert(reply->end(), bytes, bytes + sizeof message);
        fds->emplace_back(reopen(extent.fd.get(), O_RDWR));
    }
}

// Create and export a placeholder for the extents. Return a write-only descriptor or -errno, and store the id.
int export_placeholder(std::string_view prefix, std::span<const Extent> extents, std::uint64_t* exported_id = nullptr) {
    std::uint64_t length_bytes = 0;
    PlaceholderExport new_export;
    for (const Extent& extent : extents) {
        // Reopen the file, because has_other_references does not count duplicates made by dup(). The reopened
        // descriptor stays open as long as this export is kept.
        const int memory_fd = reopen(extent.fd, O_RDWR);
        if (memory_fd < 0) {
            return memory_fd;
        }
        new_export.extents.push_back({Fd(memory_fd), extent.offset_bytes, extent.length_bytes});
        length_bytes += extent.length_bytes;
    }
    register_handler(dmabuf_extents_request, serve_extents);
    const std::uint64_t id = random_u64();
    char name[64];
    std::snprintf(name, sizeof name, "%s%016llx:%016llx", prefix.data(),
                  static_cast<unsigned long long>(read_control_service_id()), static_cast<unsigned long long>(id));
    const int memfd = make_memfd(name, length_bytes);
    if (memfd < 0) {
        return memfd;
    }
    new_export.placeholder = Fd(memfd);
    const int exported_fd = reopen(memfd, O_WRONLY);
    Exports& export_table = exports();
    std::lock_guard lock(export_table.mutex);
    drop_unreferenced_exports(&export_table);
    if (exported_fd >= 0) {
        export_table.placeholders.emplace(id, std::move(new_export));
        if (exported_id != nullptr) {
            *exported_id = id;
        }
    }
    return exported_fd;
}

bool parse_16_hex_digits(std::string_view text, std::uint64_t* value) {
    if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string_view::npos) {
        return false;
    }
    *value = std::strtoull(std::string(text).c_str(), nullptr, 16);
    return true;
}

// Request the extents of a placeholder from its exporting process. `service_and_dmabuf_ids` is the end of the
// memfd's name: "<16 hex digits: id of the exporter's control service>:<16 hex digits: id of the dma-buf>".
int import_placeholder(std::string_view service_and_dmabuf_ids, std::uint64_t length_bytes, ImportedDmabuf* imported) {
    std::uint64_t service_id = 0, id = 0;
    if (service_and_dmabuf_ids.size() != 33 ||
        !parse_16_hex_digits(service_and_dmabuf_ids.substr(0, 16), &service_id) ||
        !parse_16_hex_digits(service_and_dmabuf_ids.substr(17), &id)) {
        return -EINVAL;
    }
    std::vector<std::byte> request(sizeof id), reply;
    std::memcpy(request.data(), &id, sizeof id);
    std::vector<Fd> fds;
    if (!send_control_request(service_id, dmabuf_extents_request, request, &reply, &fds)) {
        return -ENODEV;
    }
    if (reply.size() != fds.size() * sizeof(ExtentMessage)) {
        return -EINVAL;
    }
    std::uint64_t received_bytes = 0;
    for (std::size_t index = 0; index < fds.size(); ++index) {
        ExtentMessage message{};
        std::memcpy(&message, reply.data() + index * sizeof message, sizeof message);
        if (!is_device_memory(fds[index].get()) || message.offset_bytes > get_file_size(fds[index].get()) ||
            message.length_bytes > get_file_size(fds[index].get()) - message.offset_bytes ||
            message.length_bytes > length_bytes - received_bytes) {
            return -EINVAL;
        }
        received_bytes += message.length_bytes;
        imported->extents.push_back({std::move(fds[index]), message.offset_bytes, message.length_bytes});
    }
    imported->length_bytes = received_bytes;
    return received_bytes == length_bytes ? 0 : -EINVAL;
}

// The kernel shows the exporter of a dma-buf in its fdinfo, and shows exp_name for no other type of file.
bool is_kernel_dmabuf(int fd) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
    for (std::string line; std::getline(info, line);) {
        if (line.starts_with("exp_name:")) {
            return true;
        }
    }
    return false;
}

} // namespace

int make_device_memory(std::uint64_t length_bytes) {
    char name[64];
    std::snprintf(name, sizeof name, "%s%016llx", memory_name_prefix.data(),
                  static_cast<unsigned long long>(random_u64()));
    return make_memfd(name, length_bytes);
}

bool is_device_memory(int fd) {
    return read_fd_name(fd).name.starts_with(memory_name_prefix) && has_twin_seals(fd);
}

int export_dmabuf(std::span<const Extent> extents) {
    if (extents.empty() || extents.size() > max_extents) {
        return extents.empty() ? -EINVAL : -E2BIG;
    }
    if (extents.size() == 1 && extents[0].offset_bytes == 0 &&
        extents[0].length_bytes == get_file_size(extents[0].fd)) {
        return reopen(extents[0].fd, O_WRONLY);
    }
    return export_placeholder(dmabuf_name_prefix, extents);
}

int export_tracked_dmabuf(std::span<const Extent> extents, std::uint64_t* id) {
    if (extents.empty() || extents.size() > max_extents) {
        return extents.empty() ? -EINVAL : -E2BIG;
    }
    return export_placeholder(dmabuf_name_prefix, extents, id);
}

bool is_dmabuf_alive(std::uint64_t id) {
    Exports& export_table = exports();
    std::lock_guard lock(export_table.mutex);
    const auto entry = export_table.placeholders.find(id);
    if (entry == export_table.placeholders.end()) {
        return false;
    }
    if (is_opened_elsewhere(entry->second.placeholder.get())) {
        return true;
    }
    export_table.placeholders.erase(entry);
    return false;
}

int export_shareable_handle(int memory_fd) {
    // A shareable handle must not be accepted as a dma-buf. So export a separate placeholder over the whole
    // allocation.
    const Extent entire_allocation{memory_fd, 0, get_file_size(memory_fd)};
    return export_placeholder(shareable_name_prefix, {&entire_allocation, 1});
}

int import_shareable_handle(int fd) {
    const FdName fd_name = read_fd_name(fd);
    if (!fd_name.is_open) {
        return -EBADF;
    }
    if (!fd_name.name.starts_with(shareable_name_prefix) || !has_twin_seals(fd)) {
        return -EINVAL;
    }
    ImportedDmabuf imported;
    const int result = import_placeholder(std::string_view(fd_name.name).substr(shareable_name_prefix.size()),
                                          get_file_size(fd), &imported);
    if (result != 0 || imported.extents.size() != 1) {
        return result != 0 ? result : -EINVAL;
    }
    return imported.extents[0].fd.release();
}

int identify_dmabuf(int fd, DmabufOrigin* origin, std::uint64_t* length_bytes) {
    const FdName fd_name = read_fd_name(fd);
    if (!fd_name.is_open) {
        return -EBADF;
    }
    if (fd_name.is_memfd) {
        if ((!fd_name.name.starts_with(memory_name_prefix) && !fd_name.name.starts_with(dmabuf_name_prefix)) ||
            !has_twin_seals(fd)) {
            return -EINVAL;
        }
        *origin = DmabufOrigin::twin;
    } else if (is_kernel_dmabuf(fd)) {
        *origin = DmabufOrigin::kernel;
        const off_t end = lseek(fd, 0, SEEK_END);
        *length_bytes = end > 0 ? static_cast<std::uint64_t>(end) : 0;
        return 0;
    } else {
        return -EINVAL;
    }
    *length_bytes = get_file_size(fd);
    return 0;
}

int import_dmabuf(int fd, ImportedDmabuf* imported) {
    DmabufOrigin origin{};
    std::uint64_t length_bytes = 0;
    if (const int result = identify_dmabuf(fd, &origin, &length_bytes); result != 0) {
        return result;
    }
    if (origin != DmabufOrigin::twin) {
        return -EINVAL;
    }
    imported->extents.clear();
    const int attachment_fd = reopen(fd, O_WRONLY);
    if (attachment_fd < 0) {
        return attachment_fd;
    }
    imported->attachment = Fd(attachment_fd);
    const FdName fd_name = read_fd_name(fd);
    if (fd_name.name.starts_with(dmabuf_name_prefix)) {
        return import_placeholder(std::string_view(fd_name.name).substr(dmabuf_name_prefix.size()), length_bytes,
                                  imported);
    }
    const int memory_fd = reopen(fd, O_RDWR);
    if (memory_fd < 0) {
        return memory_fd;
    }
    imported->extents.push_back({Fd(memory_fd), 0, length_bytes});
    imported->length_bytes = length_bytes;
    return 0;
}

void* map_imported_dmabuf(const ImportedDmabuf& imported) {
    void* const base =
        mmap(nullptr, imported.length_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    char* address = static_cast<char*>(base);
    for (const ImportedDmabuf::OwnedExtent& extent : imported.extents) {
        if (mmap(address, extent.length_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, extent.fd.get(),
                 static_cast<off_t>(extent.offset_bytes)) == MAP_FAILED) {
            const int saved_errno = errno;
            munmap(base, imported.length_bytes);
            errno = saved_errno;
            return nullptr;
        }
        address += extent.length_bytes;
    }
    return base;
}

bool has_other_references(int fd) {
    {
        Exports& export_table = exports();
        std::lock_guard lock(export_table.mutex);
        drop_unreferenced_exports(&export_table);
    }
    return is_opened_elsewhere(fd);
}

} // namespace gdrkit::twin
