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

constexpr std::string_view memory_name = "gdrkit-gpu:";
constexpr std::string_view descriptor_name = "gdrkit-dmabuf:";
constexpr std::string_view shareable_name = "gdrkit-vmm:";

// What /proc/self/fd says the descriptor is; `name` is that of a memfd, without what the kernel puts around it.
struct Naming {
    bool open = false;
    bool memfd = false;
    std::string name;
};

Naming naming_of(int fd) {
    Naming naming;
    char link[64], target[256];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t size = readlink(link, target, sizeof target - 1);
    if (size < 0) {
        return naming;
    }
    naming.open = true;
    std::string_view text(target, static_cast<std::size_t>(size));
    constexpr std::string_view before = "/memfd:", after = " (deleted)";
    if (text.starts_with(before) && text.ends_with(after)) {
        naming.memfd = true;
        naming.name = text.substr(before.size(), text.size() - before.size() - after.size());
    }
    return naming;
}

// The names alone could be given to any memfd by accident; the seals that the twins set make it a deliberate forgery.
bool sealed_by_us(int fd) {
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
    const int opened = open(link, flags | O_CLOEXEC);
    return opened < 0 ? -errno : opened;
}

std::uint64_t size_of(int fd) {
    struct stat status {};
    return fstat(fd, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : 0;
}

// One descriptor of several extents that this process exported. The extents are kept as long as anybody holds the
// descriptor.
struct Composed {
    Fd descriptor;
    std::vector<Imported::Piece> pieces;
};

struct Exports {
    std::mutex mutex;
    std::map<std::uint64_t, Composed> composed;
};

Exports& exports() {
    static auto* const all = new Exports;
    return *all;
}

struct ExtentWire {
    std::uint64_t offset_bytes, length_bytes;
};

// Whether a file that was opened by name (/proc/self/fd) of this memfd is alive anywhere. The kernel grants a write
// lease only to the sole writer; the descriptor that memfd_create gave, and copies of it, do not count as writers,
// those opened later do.
bool opened_again(int fd) {
    const Fd own(reopen(fd, O_RDWR));
    // Somebody who opens the file in the moment of the lease makes the kernel signal its holder: SIGIO would end the
    // process, SIGURG is ignored.
    return !own || fcntl(own.get(), F_SETSIG, SIGURG) != 0 || fcntl(own.get(), F_SETLEASE, F_WRLCK) != 0;
}

void drop_unused(Exports* all) {
    std::erase_if(all->composed, [](const auto& entry) { return !opened_again(entry.second.descriptor.get()); });
}

void serve_extents(std::span<const std::byte> request, std::vector<std::byte>* reply, std::vector<Fd>* fds) {
    std::uint64_t id = 0;
    if (request.size() != sizeof id) {
        return;
    }
    std::memcpy(&id, request.data(), sizeof id);
    Exports& all = exports();
    std::lock_guard lock(all.mutex);
    const auto found = all.composed.find(id);
    if (found == all.composed.end()) {
        return;
    }
    for (const Imported::Piece& piece : found->second.pieces) {
        const ExtentWire wire{piece.offset_bytes, piece.length_bytes};
        const auto* bytes = reinterpret_cast<const std::byte*>(&wire);
        reply->insert(reply->end(), bytes, bytes + sizeof wire);
        fds->emplace_back(reopen(piece.fd.get(), O_RDWR));
    }
}

int compose(std::string_view prefix, std::span<const Extent> extents, std::uint64_t* made_id = nullptr) {
    std::uint64_t length_bytes = 0;
    Composed composed;
    for (const Extent& extent : extents) {
        // Opened again, not duplicated, so that the memory counts as held while the dma-buf lives.
        const int opened = reopen(extent.fd, O_RDWR);
        if (opened < 0) {
            return opened;
        }
        Imported::Piece piece{Fd(opened), extent.offset_bytes, extent.length_bytes};
        length_bytes += extent.length_bytes;
        composed.pieces.push_back(std::move(piece));
    }
    serve(ask_dmabuf_extents, serve_extents);
    const std::uint64_t id = random_u64();
    char name[64];
    std::snprintf(name, sizeof name, "%s%016llx:%016llx", prefix.data(),
                  static_cast<unsigned long long>(control_name()), static_cast<unsigned long long>(id));
    const int descriptor = make_memfd(name, length_bytes);
    if (descriptor < 0) {
        return descriptor;
    }
    composed.descriptor = Fd(descriptor);
    const int given = reopen(descriptor, O_WRONLY);
    Exports& all = exports();
    std::lock_guard lock(all.mutex);
    drop_unused(&all);
    if (given >= 0) {
        all.composed.emplace(id, std::move(composed));
        if (made_id != nullptr) {
            *made_id = id;
        }
    }
    return given;
}

bool parse_hex(std::string_view text, std::uint64_t* value) {
    if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string_view::npos) {
        return false;
    }
    *value = std::strtoull(std::string(text).c_str(), nullptr, 16);
    return true;
}

int import_composed(std::string_view rest, std::uint64_t length_bytes, Imported* imported) {
    std::uint64_t owner = 0, id = 0;
    if (rest.size() != 33 || !parse_hex(rest.substr(0, 16), &owner) || !parse_hex(rest.substr(17), &id)) {
        return -EINVAL;
    }
    std::vector<std::byte> request(sizeof id), reply;
    std::memcpy(request.data(), &id, sizeof id);
    std::vector<Fd> fds;
    if (!ask(owner, ask_dmabuf_extents, request, &reply, &fds)) {
        return -ENODEV;
    }
    if (reply.size() != fds.size() * sizeof(ExtentWire)) {
        return -EINVAL;
    }
    std::uint64_t sum = 0;
    for (std::size_t index = 0; index < fds.size(); ++index) {
        ExtentWire wire{};
        std::memcpy(&wire, reply.data() + index * sizeof wire, sizeof wire);
        if (!is_device_memory(fds[index].get()) || wire.offset_bytes > size_of(fds[index].get()) ||
            wire.length_bytes > size_of(fds[index].get()) - wire.offset_bytes ||
            wire.length_bytes > length_bytes - sum) {
            return -EINVAL;
        }
        sum += wire.length_bytes;
        imported->pieces.push_back({std::move(fds[index]), wire.offset_bytes, wire.length_bytes});
    }
    imported->length_bytes = sum;
    return sum == length_bytes ? 0 : -EINVAL;
}

// A dma-buf of the kernel says who exported it in its fdinfo, which no other kind of file does.
bool kernel_dmabuf(int fd) {
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
    std::snprintf(name, sizeof name, "%s%016llx", memory_name.data(), static_cast<unsigned long long>(random_u64()));
    return make_memfd(name, length_bytes);
}

bool is_device_memory(int fd) {
    return naming_of(fd).name.starts_with(memory_name) && sealed_by_us(fd);
}

int export_dmabuf(std::span<const Extent> extents) {
    if (extents.empty() || extents.size() > 64) {
        return extents.empty() ? -EINVAL : -E2BIG;
    }
    if (extents.size() == 1 && extents[0].offset_bytes == 0 && extents[0].length_bytes == size_of(extents[0].fd)) {
        return reopen(extents[0].fd, O_WRONLY);
    }
    return compose(descriptor_name, extents);
}

int export_tracked_dmabuf(std::span<const Extent> extents, std::uint64_t* id) {
    if (extents.empty() || extents.size() > 64) {
        return extents.empty() ? -EINVAL : -E2BIG;
    }
    return compose(descriptor_name, extents, id);
}

bool dmabuf_alive(std::uint64_t id) {
    Exports& all = exports();
    std::lock_guard lock(all.mutex);
    const auto found = all.composed.find(id);
    if (found == all.composed.end()) {
        return false;
    }
    if (opened_again(found->second.descriptor.get())) {
        return true;
    }
    all.composed.erase(found);
    return false;
}

int export_shareable(int memory_fd) {
    // A shareable handle is not a dma-buf, so it must not look like one: a descriptor of its own, over the whole
    // memory.
    const Extent whole{memory_fd, 0, size_of(memory_fd)};
    return compose(shareable_name, {&whole, 1});
}

int import_shareable(int fd) {
    const Naming naming = naming_of(fd);
    if (!naming.open) {
        return -EBADF;
    }
    if (!naming.name.starts_with(shareable_name) || !sealed_by_us(fd)) {
        return -EINVAL;
    }
    Imported imported;
    const int result =
        import_composed(std::string_view(naming.name).substr(shareable_name.size()), size_of(fd), &imported);
    if (result != 0 || imported.pieces.size() != 1) {
        return result != 0 ? result : -EINVAL;
    }
    return imported.pieces[0].fd.release();
}

int identify_dmabuf(int fd, DmabufOrigin* origin, std::uint64_t* length_bytes) {
    const Naming naming = naming_of(fd);
    if (!naming.open) {
        return -EBADF;
    }
    if (naming.memfd) {
        if ((!naming.name.starts_with(memory_name) && !naming.name.starts_with(descriptor_name)) || !sealed_by_us(fd)) {
            return -EINVAL;
        }
        *origin = DmabufOrigin::twin;
    } else if (kernel_dmabuf(fd)) {
        *origin = DmabufOrigin::kernel;
        const off_t end = lseek(fd, 0, SEEK_END);
        *length_bytes = end > 0 ? static_cast<std::uint64_t>(end) : 0;
        return 0;
    } else {
        return -EINVAL;
    }
    *length_bytes = size_of(fd);
    return 0;
}

int import_dmabuf(int fd, Imported* imported) {
    DmabufOrigin origin{};
    std::uint64_t length_bytes = 0;
    if (const int result = identify_dmabuf(fd, &origin, &length_bytes); result != 0) {
        return result;
    }
    if (origin != DmabufOrigin::twin) {
        return -EINVAL;
    }
    imported->pieces.clear();
    const int attached = reopen(fd, O_WRONLY);
    if (attached < 0) {
        return attached;
    }
    imported->attachment = Fd(attached);
    const Naming naming = naming_of(fd);
    if (naming.name.starts_with(descriptor_name)) {
        return import_composed(std::string_view(naming.name).substr(descriptor_name.size()), length_bytes, imported);
    }
    const int opened = reopen(fd, O_RDWR);
    if (opened < 0) {
        return opened;
    }
    imported->pieces.push_back({Fd(opened), 0, length_bytes});
    imported->length_bytes = length_bytes;
    return 0;
}

void* map_imported(const Imported& imported) {
    void* const base =
        mmap(nullptr, imported.length_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    char* at = static_cast<char*>(base);
    for (const Imported::Piece& piece : imported.pieces) {
        if (mmap(at, piece.length_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, piece.fd.get(),
                 static_cast<off_t>(piece.offset_bytes)) == MAP_FAILED) {
            const int kept = errno;
            munmap(base, imported.length_bytes);
            errno = kept;
            return nullptr;
        }
        at += piece.length_bytes;
    }
    return base;
}

bool held_elsewhere(int fd) {
    {
        Exports& all = exports();
        std::lock_guard lock(all.mutex);
        drop_unused(&all);
    }
    return opened_again(fd);
}

} // namespace gdrkit::twin
