// Command buffers and submissions: the device's own copies, by linear DMA packets on its PCI DMA queues. They are
// carried out in order by a thread, and late, so that whoever does not wait for them reads what was there before.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "hlthunk/device.hpp"
#include "hlthunk/entry.hpp"
#include "model/config.hpp"
#include "model/ledger.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin::gaudi {
namespace {

constexpr std::uint64_t buffer_bytes_most = 2 << 20; // HL_MAX_CB_SIZE
constexpr std::uint64_t buffer_room_bytes = 4 << 20; // apart from each other in the device's file
constexpr std::uint64_t destination_mask_gaudi1 = (std::uint64_t{1} << 56) - 1;
constexpr std::uint64_t wait_us_most = 3'600'000'000;

bool same_fd_copy(int to, std::uint64_t to_at, int from, std::uint64_t from_at, std::uint64_t length_bytes) {
    std::array<std::byte, 65536> part;
    while (length_bytes > 0) {
        const std::size_t count = std::min<std::uint64_t>(length_bytes, part.size());
        if (pread(from, part.data(), count, static_cast<off_t>(from_at)) != static_cast<ssize_t>(count) ||
            pwrite(to, part.data(), count, static_cast<off_t>(to_at)) != static_cast<ssize_t>(count)) {
            return false;
        }
        to_at += count;
        from_at += count;
        length_bytes -= count;
    }
    return true;
}

// Host memory is reached by system calls alone, so that what the program has unmapped meanwhile is a failed copy and no
// crash.
bool host_copy(int fd, std::uint64_t at, std::uint64_t host, std::uint64_t length_bytes, bool to_host) {
    while (length_bytes > 0) {
        auto* const memory = reinterpret_cast<void*>(host);
        const ssize_t moved = to_host ? pread(fd, memory, length_bytes, static_cast<off_t>(at))
                                      : pwrite(fd, memory, length_bytes, static_cast<off_t>(at));
        if (moved <= 0) {
            return false;
        }
        at += static_cast<std::uint64_t>(moved);
        host += static_cast<std::uint64_t>(moved);
        length_bytes -= static_cast<std::uint64_t>(moved);
    }
    return true;
}

// One packet of a command buffer. Gaudi1's driver checks packets before it takes them; later devices fail on them.
int parse(std::span<const std::byte> text, std::vector<LinearDma>* copies) {
    const bool is_gaudi1 = !properties().has_virtual_memory;
    while (!text.empty()) {
        std::uint32_t head[2] = {};
        if (text.size() < sizeof head) {
            return EINVAL;
        }
        std::memcpy(head, text.data(), sizeof head);
        if (opcode_of(head[1]) == packet_nop) {
            text = text.subspan(sizeof head);
            continue;
        }
        if (opcode_of(head[1]) != packet_lin_dma || text.size() < sizeof(LinearDma)) {
            return opcode_of(head[1]) != packet_lin_dma ? EOPNOTSUPP : EINVAL;
        }
        LinearDma packet{};
        std::memcpy(&packet, text.data(), sizeof packet);
        if ((packet.ctl & ctl_memset) != 0) {
            return EOPNOTSUPP;
        }
        constexpr std::uint32_t needed = ctl_gaudi1_linear | ctl_gaudi1_reg_barrier;
        if (is_gaudi1 && (packet.ctl & needed) != needed) {
            return EINVAL;
        }
        packet.dst_addr &= is_gaudi1 ? destination_mask_gaudi1 : UINT64_MAX;
        copies->push_back(packet);
        text = text.subspan(sizeof packet);
    }
    return 0;
}

// The packets of a chunk: Gaudi1 takes buffers of the driver, later ones those that the program has mapped. Both are in
// memory that the program can write, so they are copied first.
int read_chunk(Device* device, const Chunk& chunk, std::vector<LinearDma>* copies) {
    if (chunk.queue_index >= dma_queues) {
        return chunk.queue_index > 1024 ? EINVAL : EOPNOTSUPP;
    }
    // Gaudi1's queues take no other buffers than the driver's, and so do not look at the flag.
    if (properties().has_virtual_memory && (chunk.cs_chunk_flags & chunk_user_buffer) == 0) {
        return EINVAL;
    }
    if (chunk.cb_size < 8 || chunk.cb_size > buffer_bytes_most) {
        return EINVAL;
    }
    std::vector<std::byte> text(chunk.cb_size);
    if (!properties().has_virtual_memory) {
        const auto found = device->buffers.find(chunk.cb_handle);
        if (found == device->buffers.end() || chunk.cb_size > found->second.size_bytes ||
            pread(device->file.get(), text.data(), text.size(), static_cast<off_t>(chunk.cb_handle)) !=
                static_cast<ssize_t>(text.size())) {
            return EINVAL;
        }
        return parse(text, copies);
    }
    auto after = device->mappings.upper_bound(chunk.cb_handle);
    if (after == device->mappings.begin()) {
        return EINVAL;
    }
    const auto& [address, mapping] = *std::prev(after);
    const std::uint64_t within = chunk.cb_handle - address;
    if (mapping.allocation || within > mapping.length_bytes || chunk.cb_size > mapping.length_bytes - within) {
        return EINVAL;
    }
    std::memcpy(text.data(), reinterpret_cast<const void*>(mapping.host_address + within), text.size());
    return parse(text, copies);
}

int submit_all(int fd, const SubmissionIn* in, SubmissionOut* out) {
    int error = 0;
    const DeviceRef device = in == nullptr || out == nullptr ? nullptr : find_device(fd, &error);
    if (!device) {
        return in == nullptr || out == nullptr ? EINVAL : error;
    }
    if (in->num_chunks_execute == 0 || in->num_chunks_execute > chunks_most || in->chunks_execute == nullptr) {
        return EINVAL;
    }
    if (in->num_chunks_restore != 0 || in->flags != 0) {
        return EOPNOTSUPP;
    }
    const std::span chunks(static_cast<const Chunk*>(in->chunks_execute), in->num_chunks_execute);
    std::vector<LinearDma> copies;
    {
        std::lock_guard lock(device->mutex);
        if (!device->operational) {
            return EBUSY;
        }
        for (const Chunk& chunk : chunks) {
            if (const int refused = read_chunk(device.get(), chunk, &copies); refused != 0) {
                return refused;
            }
        }
    }
    *out = {device->submit(std::move(copies)), 0, 0};
    return 0;
}

} // namespace

bool Device::resolve(std::uint64_t address, std::uint64_t length_bytes, Place* place) {
    const Properties& ours = properties();
    const auto after = mappings.upper_bound(address);
    if (after != mappings.begin()) {
        const auto& [begin, mapping] = *std::prev(after);
        if (address - begin <= mapping.length_bytes && length_bytes <= mapping.length_bytes - (address - begin)) {
            *place = mapping.allocation ? Place{mapping.allocation->memory.get(), address - begin}
                                        : Place{-1, mapping.host_address + (address - begin)};
            return true;
        }
    }
    if (ours.has_virtual_memory || address < ours.dram_user_base || address > ours.dram_end() ||
        length_bytes > ours.dram_end() - address) {
        return false;
    }
    if (!dram) {
        dram = Fd(make_device_memory(ours.dram_bytes));
    }
    *place = {dram.get(), address - ours.dram_base};
    return static_cast<bool>(dram);
}

bool Device::carry_out(const LinearDma& copy) {
    Place to, from;
    if (!resolve(copy.src_addr, copy.tsize, &from) || !resolve(copy.dst_addr, copy.tsize, &to)) {
        return false;
    }
    if (from.fd >= 0 && to.fd >= 0) {
        return same_fd_copy(to.fd, to.at, from.fd, from.at, copy.tsize);
    }
    if (from.fd < 0 && to.fd < 0) {
        return false; // from host to host: nothing for this device
    }
    return to.fd < 0 ? host_copy(from.fd, from.at, to.at, copy.tsize, true)
                     : host_copy(to.fd, to.at, from.at, copy.tsize, false);
}

std::uint64_t Device::submit(std::vector<LinearDma> copies) {
    std::lock_guard lock(mutex);
    if (!worker_.joinable()) {
        worker_ = start_quiet_thread([this] { run(); });
    }
    jobs_.push_back({++last_sequence, std::move(copies)});
    changed.notify_all();
    return last_sequence;
}

void Device::run() {
    std::unique_lock lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return ending_ || !jobs_.empty(); });
        if (ending_) {
            return;
        }
        const Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        be_late();
        lock.lock();
        const bool done =
            aborted_sequence == 0 && std::all_of(job.copies.begin(), job.copies.end(),
                                                 [this](const LinearDma& copy) { return carry_out(copy); });
        if (!done && aborted_sequence == 0) {
            // A page fault of the device: the driver resets it, and this context is of no more use.
            aborted_sequence = job.sequence;
            operational = false;
        }
        completed_sequence = job.sequence;
        changed.notify_all();
    }
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_request_command_buffer(int fd, std::uint32_t size, std::uint64_t* handle) {
    return entry("hlthunk_request_command_buffer", [&] {
        int error = 0;
        const DeviceRef device = handle == nullptr ? nullptr : find_device(fd, &error);
        if (!device) {
            return handle == nullptr ? EINVAL : error;
        }
        if (size == 0 || size > buffer_bytes_most) {
            return EINVAL;
        }
        std::lock_guard lock(device->mutex);
        *handle = ++device->last_buffer * buffer_room_bytes;
        device->buffers.emplace(*handle, CommandBuffer{size});
        ledger_add("gaudi_command_buffer", reinterpret_cast<std::uint64_t>(device.get()) ^ *handle);
        return 0;
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_destroy_command_buffer(int fd, std::uint64_t handle) {
    return entry("hlthunk_destroy_command_buffer", [&] {
        int error = 0;
        const DeviceRef device = find_device(fd, &error);
        if (!device) {
            return error;
        }
        std::lock_guard lock(device->mutex);
        if (device->buffers.erase(handle) == 0) {
            return EINVAL;
        }
        static_cast<void>(
            ledger_remove("gaudi_command_buffer", reinterpret_cast<std::uint64_t>(device.get()) ^ handle));
        return 0;
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_command_submission(int fd, SubmissionIn* in, SubmissionOut* out) {
    return entry("hlthunk_command_submission", [&] { return submit_all(fd, in, out); });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_command_submission_timeout(int fd, SubmissionIn* in, SubmissionOut* out,
                                                            std::uint32_t /*timeout_s*/) {
    return entry("hlthunk_command_submission_timeout", [&] { return submit_all(fd, in, out); });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_wait_for_cs(int fd, std::uint64_t sequence, std::uint64_t timeout_us,
                                             std::uint32_t* status) {
    return entry("hlthunk_wait_for_cs", [&] {
        int error = 0;
        const DeviceRef device = status == nullptr ? nullptr : find_device(fd, &error);
        if (!device) {
            return status == nullptr ? EINVAL : error;
        }
        std::unique_lock lock(device->mutex);
        if (sequence == 0 || sequence > device->last_sequence) {
            return EINVAL;
        }
        const auto limit = std::chrono::microseconds(std::min(timeout_us, wait_us_most));
        // Not wait_for, whose clock TSan of old compilers does not know.
        const auto until = std::chrono::system_clock::now() + limit;
        if (!device->changed.wait_until(lock, until, [&] { return device->completed_sequence >= sequence; })) {
            *status = wait_busy;
            return 0;
        }
        const bool aborted = device->aborted_sequence != 0 && sequence >= device->aborted_sequence;
        *status = aborted ? wait_aborted : wait_completed;
        return aborted ? EIO : 0;
    });
}

GDRKIT_HLTHUNK_ENTRY bool hlthunk_is_device_idle(int fd) {
    int error = 0;
    const DeviceRef device = load_error().empty() ? find_device(fd, &error) : nullptr;
    if (!device) {
        return false;
    }
    std::lock_guard lock(device->mutex);
    return device->completed_sequence == device->last_sequence;
}

} // namespace gdrkit::twin::gaudi
