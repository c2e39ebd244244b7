// Command buffers and command submissions: copies by linear DMA packets on the PCI DMA queues. A thread carries them
// out in order after random delays, so a program that does not wait reads old data.
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

constexpr std::uint64_t max_buffer_bytes = 2 << 20;  // HL_MAX_CB_SIZE
constexpr std::uint64_t buffer_room_bytes = 4 << 20; // distance between command buffers in the device file
constexpr std::uint64_t destination_mask_gaudi1 = (std::uint64_t{1} << 56) - 1;
constexpr std::uint64_t max_wait_us = 3'600'000'000;

bool copy_between_files(int to, std::uint64_t to_at, int from, std::uint64_t from_at, std::uint64_t length_bytes) {
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

// Copy between a file and host memory. System calls access the host memory, so that unmapped memory makes the copy fail
// instead of the process.
bool copy_host(int fd, std::uint64_t at, std::uint64_t host, std::uint64_t length_bytes, bool to_host) {
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

// Parse the packets of a command buffer. The first Gaudi's driver checks packets at submission; later devices fail when
// they execute them.
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

// Parse the packets of a chunk. The first Gaudi takes command buffers of the driver, later generations buffers that the
// program has mapped. The program can write to both, so they are copied first.
int read_chunk(Device* device, const Chunk& chunk, std::vector<LinearDma>* copies) {
    if (chunk.queue_index >= dma_queues) {
        return chunk.queue_index > 1024 ? EINVAL : EOPNOTSUPP;
    }
    // The first Gaudi's queues only take buffers of the driver, so the driver ignores the flag.
    if (properties().has_virtual_memory && (chunk.cs_chunk_flags & chunk_user_buffer) == 0) {
        return EINVAL;
    }
    if (chunk.cb_size < 8 || chunk.cb_size > max_buffer_bytes) {
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
    if (in->num_chunks_execute == 0 || in->num_chunks_execute > max_chunks || in->chunks_execute == nullptr) {
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
            if (const int error_code = read_chunk(device.get(), chunk, &copies); error_code != 0) {
                return error_code;
            }
        }
    }
    *out = {device->submit(std::move(copies)), 0, 0};
    return 0;
}

} // namespace

bool Device::resolve(std::uint64_t address, std::uint64_t length_bytes, CopyOperand* operand) {
    const Properties& device_properties = properties();
    const auto after = mappings.upper_bound(address);
    if (after != mappings.begin()) {
        const auto& [begin, mapping] = *std::prev(after);
        if (address - begin <= mapping.length_bytes && length_bytes <= mapping.length_bytes - (address - begin)) {
            *operand = mapping.allocation ? CopyOperand{mapping.allocation->memory.get(), address - begin}
                                          : CopyOperand{-1, mapping.host_address + (address - begin)};
            return true;
        }
    }
    if (device_properties.has_virtual_memory || address < device_properties.dram_user_base ||
        address > device_properties.dram_end() || length_bytes > device_properties.dram_end() - address) {
        return false;
    }
    if (!dram) {
        dram = Fd(make_device_memory(device_properties.dram_bytes));
    }
    *operand = {dram.get(), address - device_properties.dram_base};
    return static_cast<bool>(dram);
}

bool Device::run_copy(const LinearDma& copy) {
    CopyOperand to, from;
    if (!resolve(copy.src_addr, copy.tsize, &from) || !resolve(copy.dst_addr, copy.tsize, &to)) {
        return false;
    }
    if (from.fd >= 0 && to.fd >= 0) {
        return copy_between_files(to.fd, to.offset, from.fd, from.offset, copy.tsize);
    }
    if (from.fd < 0 && to.fd < 0) {
        return false; // the device does not copy from host to host
    }
    return to.fd < 0 ? copy_host(from.fd, from.offset, to.offset, copy.tsize, true)
                     : copy_host(to.fd, to.offset, from.offset, copy.tsize, false);
}

std::uint64_t Device::submit(std::vector<LinearDma> copies) {
    std::lock_guard lock(mutex);
    if (!worker_.joinable()) {
        worker_ = start_signal_blocking_thread([this] { run(); });
    }
    jobs_.push_back({++last_sequence, std::move(copies)});
    changed.notify_all();
    return last_sequence;
}

void Device::run() {
    std::unique_lock lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (stopping_) {
            return;
        }
        const Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        sleep_random_delay();
        lock.lock();
        const bool done =
            aborted_sequence == 0 &&
            std::all_of(job.copies.begin(), job.copies.end(), [this](const LinearDma& copy) { return run_copy(copy); });
        if (!done && aborted_sequence == 0) {
            // The device has a page fault: the driver resets it, and this context becomes unusable.
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
        if (size == 0 || size > max_buffer_bytes) {
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
        const auto limit = std::chrono::microseconds(std::min(timeout_us, max_wait_us));
        // wait_for would use a clock that ThreadSanitizer of older compilers does not support.
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
