// Publication of GPU iovs through the agent or by a link alone, and the search for publications of other processes.
#include "usrbio/client/gpu_publish.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <span>

#include "common/errno_text.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/publication.hpp"
#include "usrbio/client/share_handle.hpp"

namespace gdrkit::usrbio {
namespace {

std::filesystem::path make_iovs_folder_path(const std::string& mount) {
    return mount + "/3fs-virt/iovs";
}

// Calls `visit` with the name and the parsed name of each link to device memory, until `visit` returns true. Returns 0,
// or the -errno with which reading the directory failed.
template <typename Visit> int for_each_gpu_link(const std::string& mount, const Visit& visit) {
    std::error_code error;
    for (std::filesystem::directory_iterator entry(make_iovs_folder_path(mount), error), end; !error && entry != end;
         entry.increment(error)) {
        const std::string name = entry->path().filename().native();
        if (const auto parsed_name = parse_gpu_link_name(name); parsed_name && visit(name, *parsed_name)) {
            break;
        }
    }
    return -error.value();
}

bool has_agent_socket(const std::string& mount) {
    struct stat attributes {};
    return stat((mount + "/3fs-virt/agent.sock").c_str(), &attributes) == 0;
}

// Returns the share handle by which the agent registers the memory. For an iov in a block of the pool, the handle
// covers the whole block, so that the agent can use the same registration for each later iov in the block.
ShareHandle make_share_handle(const GpuIov& gpu_iov, const Dmabuf& dmabuf) {
    ShareHandle handle;
    handle.owner = identify_this_process();
    handle.length_bytes = gpu_iov.block != nullptr ? gpu_iov.block->block_bytes : gpu_iov.size_bytes;
    if (dmabuf.descriptor) {
        handle.kind = ShareKind::dmabuf;
        handle.allocation_bytes = dmabuf.size_bytes;
        handle.offset_bytes = dmabuf.offset_bytes;
        handle.address = gpu_iov.pointer;
        handle.descriptor_count = 1;
    } else {
        handle.kind = ShareKind::ipc;
        handle.allocation_bytes = gpu_iov.allocation.bytes;
        handle.offset_bytes = gpu_iov.pointer - gpu_iov.allocation.base;
        handle.ipc = *gpu_iov.ipc;
    }
    return handle;
}

// Returns the target of the link. The target contains no address, because an address of this process has no meaning in
// other processes.
GpuTarget make_link_target(const GpuIov& gpu_iov, const Dmabuf& dmabuf) {
    if (gpu_iov.ipc) {
        return {gpu_iov.device, gpu_iov.allocation.bytes, gpu_iov.pointer - gpu_iov.allocation.base, gpu_iov.size_bytes,
                gpu_iov.ipc};
    }
    return {gpu_iov.device, dmabuf.size_bytes, dmabuf.offset_bytes, gpu_iov.size_bytes, std::nullopt};
}

int publish_by_share_handle(GpuIov& gpu_iov, const std::string& name, const Dmabuf& dmabuf) {
    ShareHandle handle = make_share_handle(gpu_iov, dmabuf);
    if (const int error = query_device_uuid(gpu_iov, &handle.device_uuid); error != 0) {
        return error;
    }
    const auto packed_handle = pack(handle);
    if (!packed_handle) {
        return -EINVAL;
    }
    if (dmabuf.descriptor) {
        log_line(LogLevel::info, "%s goes to the agent by a dma-buf of %llu bytes, at offset %llu", name.c_str(),
                 static_cast<unsigned long long>(dmabuf.size_bytes),
                 static_cast<unsigned long long>(dmabuf.offset_bytes));
    }
    const int dmabuf_fd = dmabuf.descriptor.get();
    const auto descriptors = dmabuf.descriptor ? std::span(&dmabuf_fd, 1) : std::span<const int>();
    return publish(gpu_iov.mount.c_str(), name, format_target(make_link_target(gpu_iov, dmabuf)),
                   std::as_bytes(std::span(*packed_handle)), descriptors);
}

int publish_to_agent(GpuIov& gpu_iov, const std::string& name) {
    if (gpu_iov.block != nullptr) {
        return publish_by_share_handle(gpu_iov, name, gpu_iov.block->dmabuf);
    }
    Dmabuf dmabuf;
    if (const int error = export_dmabuf(gpu_iov.driver, gpu_iov.pointer, gpu_iov.size_bytes, &dmabuf); error != 0) {
        if (error != -ENOTSUP || !gpu_iov.ipc) {
            return error;
        }
        log_line(LogLevel::warning,
                 "%s has no dma-buf. The agent can only try to register its IPC handle through a peer-memory module",
                 name.c_str());
    }
    return publish_by_share_handle(gpu_iov, name, dmabuf);
}

int publish_by_link(GpuIov& gpu_iov, const std::string& name) {
    if (!gpu_iov.ipc) {
        log_line(
            LogLevel::error,
            "%s has no IPC handle. Without an agent, a publication needs one; start an agent, which accepts a dma-buf",
            name.c_str());
        return -ENOTSUP;
    }
    return publish(gpu_iov.mount.c_str(), name, format_target(make_link_target(gpu_iov, {})), {}, {});
}

} // namespace

int query_device_uuid(const GpuIov& gpu_iov, std::array<std::uint8_t, 16>* uuid) {
    cuda::Uuid cuda_uuid{};
    if (gpu_iov.driver.device_uuid(&cuda_uuid, gpu_iov.device) != cuda::success) {
        return -ENODEV;
    }
    std::ranges::copy(cuda_uuid.bytes, uuid->begin());
    return 0;
}

int publish_gpu_iov(GpuIov& gpu_iov, const std::uint8_t id[16]) {
    const std::string name = make_gpu_link_name(id, gpu_iov.device);
    const int error =
        has_agent_socket(gpu_iov.mount) ? publish_to_agent(gpu_iov, name) : publish_by_link(gpu_iov, name);
    if (error == 0) {
        gpu_iov.publication_name = name;
    } else {
        log_line(LogLevel::error, "publish %s in %s failed: %s", name.c_str(), gpu_iov.mount.c_str(),
                 ErrnoText(-error).c_str());
    }
    return error;
}

int find_publication(const char* mount, const std::uint8_t id[16], std::string* name) {
    name->clear();
    int match_count = 0;
    const int error = for_each_gpu_link(mount, [&](const std::string& link_name, const GpuLinkName& parsed_name) {
        if (std::equal(parsed_name.id.begin(), parsed_name.id.end(), id)) {
            *name = link_name;
            ++match_count;
        }
        return false;
    });
    if (error != 0) {
        return error;
    }
    if (match_count > 1) {
        log_line(LogLevel::error, "%s and another link in %s have the same UUID", name->c_str(), mount);
        return -EINVAL;
    }
    return match_count == 0 ? -ENOENT : 0;
}

int borrow_owner_publication(GpuIov& gpu_iov, std::uint64_t offset_bytes, std::uint8_t id[16]) {
    std::fill_n(id, 16, std::uint8_t{0});
    int status = 0;
    // Ignore an error of reading the directory, because an import also works in a mount without publications.
    for_each_gpu_link(gpu_iov.mount, [&](const std::string& name, const GpuLinkName& parsed_name) {
        // Ignore an error of reading the link, because its owner may have removed it meanwhile.
        std::error_code read_error;
        const std::string target_text =
            std::filesystem::read_symlink(make_iovs_folder_path(gpu_iov.mount) / name, read_error).native();
        const auto target = parse_target(target_text);
        // The IPC handle identifies the allocation. Do not compare `gpu_iov.device`, because the device may have
        // another number in the owner's process.
        const bool is_match = target && target->device == parsed_name.owner_device && target->ipc == gpu_iov.ipc &&
                              target->offset_bytes == offset_bytes && target->size_bytes == gpu_iov.size_bytes;
        if (is_match) {
            std::ranges::copy(parsed_name.id, id);
            status = gpu_iov.borrowed_publication.borrow(gpu_iov.mount.c_str(), name, target_text);
        }
        return is_match;
    });
    return status;
}

} // namespace gdrkit::usrbio
