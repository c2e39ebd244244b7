// The C functions for buffers in host memory: hf3fs_iovcreate, hf3fs_iovopen, hf3fs_iovwrap, hf3fs_iovunlink and
// hf3fs_iovdestroy.
#include "usrbio/client/host_iov.hpp"

#include "common/errno_text.hpp"
#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/host_pool.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/publication.hpp"

#include <dirent.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

static_assert(sizeof(hf3fs_iov) == 312 && offsetof(hf3fs_iov, base) == 0 && offsetof(hf3fs_iov, iovh) == 8 &&
              offsetof(hf3fs_iov, id) == 16 && offsetof(hf3fs_iov, mount_point) == 32 &&
              offsetof(hf3fs_iov, size) == 288 && offsetof(hf3fs_iov, block_size) == 296 &&
              offsetof(hf3fs_iov, numa) == 304);

namespace gdrkit::usrbio {

bool is_valid_mount(const char* mount) noexcept {
    return mount != nullptr && *mount != 0 &&
           strnlen(mount, sizeof(hf3fs_iov::mount_point)) < sizeof(hf3fs_iov::mount_point);
}

namespace {

Uuid get_id(const hf3fs_iov& iov) noexcept {
    Uuid id;
    std::memcpy(id.data(), iov.id, id.size());
    return id;
}

void fill_iov(hf3fs_iov& iov, void* base, hf3fs_iov_handle handle, const Uuid& id, const char* mount, std::size_t size,
              std::size_t block_size, int numa) noexcept {
    iov = {};
    iov.base = static_cast<std::uint8_t*>(base);
    iov.iovh = handle;
    std::memcpy(iov.id, id.data(), id.size());
    std::strcpy(iov.mount_point, mount);
    iov.size = size;
    iov.block_size = block_size;
    iov.numa = numa;
}

// Returns the shm_open name of the file in /dev/shm that is the target of a link. Returns an empty string if the target
// is not directly in /dev/shm.
std::string parse_shared_memory_name(std::string_view target) {
    const std::string_view folder = shared_memory_folder;
    if (!target.starts_with(folder) || target.size() < folder.size() + 2 || target[folder.size()] != '/' ||
        target.find('/', folder.size() + 1) != std::string_view::npos) {
        return {};
    }
    return std::string(target.substr(folder.size()));
}

int read_link(const std::string& link_path, std::string& target) {
    char buffer[PATH_MAX];
    const ssize_t length = readlink(link_path.c_str(), buffer, sizeof(buffer));
    if (length < 0) {
        return -errno;
    }
    target.assign(buffer, static_cast<std::size_t>(length));
    return 0;
}

} // namespace

HostIov::HostIov(bool is_creator, std::string mount, std::string link_name)
    : is_creator_(is_creator), creator_pid_(getpid()), mount_(std::move(mount)), link_name_(std::move(link_name)) {}

void HostIov::unlink(hf3fs_iov&) noexcept {
    memory->remove_name();
}

bool HostIov::destroy(hf3fs_iov& iov) noexcept {
    const bool is_publisher = is_creator_ && creator_pid_ == getpid();
    // Only the publisher can keep the memory for a later iov: if the pool takes such memory, if no child may have
    // mapped it, and if the library can fill it with zeros.
    Descriptor file = is_publisher && may_keep_memory && !memory->may_be_mapped_by_child() && memory->make_writable()
                          ? memory->reopen()
                          : Descriptor();
    const bool asks_to_keep = file && leaves_enough_shared_memory(file.get(), memory->bytes());
    // Remove the name in /dev/shm before the publication is withdrawn. If this process is killed in between, the agent
    // withdraws the publication; in the reverse order, the file would stay in /dev/shm. If this process asks the agent
    // to keep the memory, the name stays until the agent has answered.
    if (!asks_to_keep) {
        memory->remove_name();
    }
    if (is_publisher) {
        std::shared_ptr<AgentConnection> keeping_agent;
        const int status = asks_to_keep ? unpublish_and_keep(mount_.c_str(), link_name_, &keeping_agent)
                                        : unpublish(mount_.c_str(), link_name_);
        if (status != 0) {
            log_line(LogLevel::info, "unpublish %s failed: %s", link_name_.c_str(), ErrnoText(-status).c_str());
        }
        if (keeping_agent != nullptr) {
            keep_host_memory({memory, std::move(file)}, std::move(keeping_agent), numa);
        } else { // The agent does not keep the memory registered, so the name is not needed any more.
            memory->remove_name();
        }
    }
    borrowed_publication.end_borrow(); // Does nothing unless open_host_iov() opened the memory of another process.
    unregister_iov(iov.iovh);
    log_line(LogLevel::info, "destroyed %s", link_name_.c_str());
    iov.base = nullptr;
    iov.iovh = nullptr;
    return true;
}

namespace {

// Takes memory of an earlier iov from the pool, fills it with zeros and publishes it. Returns 0, -ENOENT if the mount
// has no agent or the pool has no usable memory, or the error of the publication.
int publish_kept_memory(HostIov& host_iov, const char* mount, const std::string& link_name, std::size_t size,
                        int numa) {
    std::shared_ptr<AgentConnection> agent;
    if (find_agent_connection(mount, agent) != 0) {
        return -ENOENT;
    }
    KeptMemory kept = take_host_memory(*agent, size, numa);
    if (kept.memory == nullptr) {
        return -ENOENT;
    }
    int status = -ENOENT;
    if (has_name(kept)) {
        std::memset(kept.memory->base(), 0, kept.memory->bytes());
        status = publish(mount, link_name, shared_memory_folder + kept.memory->name());
    }
    if (status != 0) {
        drop_registration(kept, *agent);
        return status;
    }
    host_iov.memory = std::move(kept.memory);
    return 0;
}

int allocate_and_publish(HostIov& host_iov, const char* mount, const std::string& link_name,
                         const std::string& shared_memory_name, std::size_t size, int numa) {
    host_iov.memory = std::make_shared<SharedMemory>();
    if (const int status = host_iov.memory->create_unnamed(shared_memory_name, size, numa); status != 0) {
        log_line(LogLevel::error, "allocate %zu bytes of shared memory failed: %s", size, ErrnoText(-status).c_str());
        return -EIO;
    }
    const std::string target = shared_memory_folder + shared_memory_name;
    // If /dev/shm does not support O_TMPFILE, create_unnamed() creates a file with a name, and unnamed_fd() is -1.
    return host_iov.memory->unnamed_fd() >= 0 ? publish_unnamed(mount, link_name, target, *host_iov.memory)
                                              : publish(mount, link_name, target);
}

} // namespace

int create_host_iov(hf3fs_iov& iov, const char* mount, std::size_t size, std::size_t block_size, int numa,
                    const RingAttributes* ring_attributes) noexcept {
    try {
        const Uuid id = make_random_uuid();
        const std::string link_name = make_link_name(id, block_size, ring_attributes);
        const std::string shared_memory_name = make_shared_memory_name(id);
        const auto new_iov = std::make_shared<HostIov>(true, mount, link_name);
        new_iov->may_keep_memory = ring_attributes == nullptr && may_keep_host_memory(size);
        new_iov->numa = numa;
        hf3fs_iov_handle handle = register_iov(new_iov);
        const std::uint64_t freed_count_before = get_host_pool_freed_count();
        int status = new_iov->may_keep_memory ? publish_kept_memory(*new_iov, mount, link_name, size, numa) : -ENOENT;
        if (status != 0) {
            status = allocate_and_publish(*new_iov, mount, link_name, shared_memory_name, size, numa);
            // Idle memory of this process may have used up /dev/shm (-EIO), the quota of the user (-EDQUOT), or the
            // memory that the agent may pin (-ENOMEM). So free the idle memory and try again.
            if (status == -EIO || status == -EDQUOT || status == -ENOMEM) {
                trim_host_pool(0);
                // If no thread has freed memory since the first attempt, another attempt would fail too.
                if (get_host_pool_freed_count() != freed_count_before) {
                    status = allocate_and_publish(*new_iov, mount, link_name, shared_memory_name, size, numa);
                }
            }
        }
        if (status != 0) {
            unregister_iov(handle);
            return status;
        }
        // The agent and this process have mapped the ring now, and no other process opens it, so it needs no name.
        if (ring_attributes != nullptr) {
            new_iov->memory->remove_name();
        }
        fill_iov(iov, new_iov->memory->base(), handle, id, mount, size, block_size, numa);
        log_line(LogLevel::info, "created %s %s: %zu bytes of shared memory",
                 ring_attributes == nullptr ? "iov" : "ring", link_name.c_str(), size);
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

namespace {

int open_host_iov(hf3fs_iov& iov, const Uuid& id, const char* mount, std::size_t size, std::size_t block_size,
                  int numa) {
    const std::string link_name = make_link_name(id, block_size, nullptr);
    std::string target;
    if (const int status = read_link(make_link_path(mount, link_name), target); status != 0) {
        return status;
    }
    const std::string shared_memory_name = parse_shared_memory_name(target);
    if (shared_memory_name.empty()) {
        log_line(LogLevel::error, "%s points to %s, which is not in /dev/shm", link_name.c_str(), target.c_str());
        return -EINVAL;
    }
    const auto opened_iov = std::make_shared<HostIov>(false, mount, link_name);
    if (const int status = opened_iov->memory->open(shared_memory_name, size, numa); status != 0) {
        log_line(LogLevel::error, "map %s failed: %s", target.c_str(), ErrnoText(-status).c_str());
        return status == -ENOENT ? -ENOENT : -EIO;
    }
    // The creator of the memory has published it. Borrow its publication: the agent then lets rings of this process use
    // the memory.
    if (const int status = opened_iov->borrowed_publication.borrow(mount, link_name, target); status != 0) {
        return status;
    }
    fill_iov(iov, opened_iov->memory->base(), register_iov(opened_iov), id, mount, size, block_size, numa);
    log_line(LogLevel::info, "opened iov %s: %zu bytes of shared memory", link_name.c_str(), size);
    return 0;
}

// Returns true if the mount has an agent and is not a FUSE mount. Without FUSE, the agent does not notice links that an
// application makes, so the library must publish them to the agent.
bool must_notify_agent(const char* mount) noexcept {
    struct statfs attributes {};
    std::shared_ptr<AgentConnection> agent;
    return statfs(mount, &attributes) == 0 && attributes.f_type != FUSE_SUPER_MAGIC &&
           find_agent_connection(mount, agent) == 0;
}

// Parses the block size in the name of a link to host memory with this id: <id> or <id>.b<block size>. Returns false
// for every other name.
bool parse_block_size(std::string_view name, const std::string& id, std::size_t& block_size) noexcept {
    if (!name.starts_with(id)) {
        return false;
    }
    name.remove_prefix(id.size());
    if (name.empty()) {
        block_size = 0;
        return true;
    }
    if (!name.starts_with(".b")) {
        return false;
    }
    const auto [end, error] = std::from_chars(name.data() + 2, name.data() + name.size(), block_size);
    return error == std::errc() && end == name.data() + name.size();
}

// Finds the link that the application has made for an id, and sets `target` to its target. If no link has the block
// size `block_size`, sets `block_size` to the block size in the name of the link that exists. Returns -ENOENT if there
// is no link.
int find_link(const char* mount, const Uuid& id, std::size_t& block_size, std::string& target) {
    if (read_link(make_link_path(mount, make_link_name(id, block_size, nullptr)), target) == 0) {
        return 0;
    }
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(make_link_path(mount, "").c_str()), closedir);
    if (folder == nullptr) {
        return -errno;
    }
    const std::string id_text = to_string(id);
    std::size_t link_block_size = 0;
    while (const dirent* entry = readdir(folder.get())) {
        if (parse_block_size(entry->d_name, id_text, link_block_size) &&
            read_link(make_link_path(mount, entry->d_name), target) == 0) {
            block_size = link_block_size;
            return 0;
        }
    }
    return -ENOENT;
}

// Finds the link that the application has made for memory that it has mapped. Publishes the memory if
// must_notify_agent() returns true. Sets `block_size` to the block size in the name of the link.
int publish_wrapped(const char* mount, const Uuid& id, std::size_t& block_size) {
    std::string target;
    if (const int status = find_link(mount, id, block_size, target); status != 0) {
        log_line(LogLevel::error, "hf3fs_iovwrap: find the link %s in %s failed: %s; create it before the call",
                 to_string(id).c_str(), make_link_path(mount, "").c_str(), ErrnoText(-status).c_str());
        return status;
    }
    return must_notify_agent(mount) ? publish(mount, make_link_name(id, block_size, nullptr), target) : 0;
}

} // namespace

} // namespace gdrkit::usrbio

using namespace gdrkit::usrbio;

extern "C" {

int hf3fs_iovcreate(hf3fs_iov* iov, const char* mount, size_t size, size_t block_size, int numa) {
    if (iov == nullptr || !is_valid_mount(mount) || size == 0 || block_size > size) {
        return -EINVAL;
    }
    return create_host_iov(*iov, mount, size, block_size, numa, nullptr);
}

int hf3fs_iovopen(hf3fs_iov* iov, const uint8_t id[16], const char* mount, size_t size, size_t block_size, int numa) {
    if (iov == nullptr || id == nullptr || !is_valid_mount(mount) || size == 0) {
        return -EINVAL;
    }
    try {
        Uuid uuid;
        std::memcpy(uuid.data(), id, uuid.size());
        return open_host_iov(*iov, uuid, mount, size, block_size, numa);
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

int hf3fs_iovwrap(hf3fs_iov* iov, void* base, const uint8_t id[16], const char* mount, size_t size, size_t block_size,
                  int numa) {
    if (iov == nullptr || base == nullptr || id == nullptr || !is_valid_mount(mount) || size == 0) {
        return -EINVAL;
    }
    try {
        Uuid uuid;
        std::memcpy(uuid.data(), id, uuid.size());
        if (const int status = publish_wrapped(mount, uuid, block_size); status != 0) {
            return status;
        }
        log_line(LogLevel::info, "wrapped iov %s: %zu bytes of the application's memory",
                 make_link_name(uuid, block_size, nullptr).c_str(), size);
        bind_to_numa_node(base, size, numa);
        fill_iov(*iov, base, nullptr, uuid, mount, size, block_size, numa);
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

void hf3fs_iovunlink(hf3fs_iov* iov) {
    if (iov == nullptr) {
        return;
    }
    if (const auto backing = find_iov(iov->iovh); backing != nullptr) {
        backing->unlink(*iov);
    }
}

void hf3fs_iovdestroy(hf3fs_iov* iov) {
    if (iov == nullptr || iov->base == nullptr) {
        return;
    }
    if (const auto backing = find_iov(iov->iovh); backing != nullptr) {
        backing->destroy(*iov);
        return;
    }
    if (iov->iovh != nullptr) {
        log_line(LogLevel::error, "hf3fs_iovdestroy: this iov was destroyed before, or its struct is corrupt");
        return;
    }
    // Only hf3fs_iovwrap leaves `iovh` null, so this iov was wrapped.
    if (is_valid_mount(iov->mount_point) && must_notify_agent(iov->mount_point)) {
        try {
            unpublish(iov->mount_point, make_link_name(get_id(*iov), iov->block_size, nullptr));
        } catch (const std::bad_alloc&) {
            log_line(LogLevel::error, "hf3fs_iovdestroy: out of memory");
        }
    }
    iov->base = nullptr;
}

} // extern "C"
