// Command buffers and command submissions of the hl-thunk twin: copies by linear DMA packets on the PCI DMA queues. A
// thread carries out the copies in order after random delays, so a program that does not wait reads old data.
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

constexpr std::uint64_t max_command_buffer_bytes = 2 << 20; // HL_MAX_CB_SIZE
// The handle of a command buffer is its offset in Device::file. Handles are multiples of this distance.
constexpr std::uint64_t command_buffer_spacing_bytes = 4 << 20;
// On the first Gaudi, the upper bits of a destination address are a part of the context id.
constexpr std::uint64_t destination_mask_gaudi1 = (std::uint64_t{1} << 56) - 1;
constexpr std::uint64_t max_wait_us = 3'600'000'000; // one hour, so that no deadline overflows

bool copy_between_files(int target_fd, std::uint64_t target_offset, int source_fd, std::uint64_t source_offset,
                        std::uint64_t length_bytes) {
    std::array<std::byte, 65536> buffer;
    while (length_bytes > 0) {
        const std::size_t part_bytes = std::min<std::uint64_t>(length_bytes, buffer.size());
        if (pread(source_fd, buffer.data(), part_bytes, static_cast<off_t>(source_offset)) !=
                static_cast<ssize_t>(part_bytes) ||
            pwrite(target_fd, buffer.data(), part_bytes, static_cast<off_t>(target_offset)) !=
                static_cast<ssize_t>(part_bytes)) {
            return false;
        }
        target_offset += part_bytes;
        source_offset += part_bytes;
        length_bytes -= part_bytes;
    }
    return true;
}

// Copy between a file and host memory. System calls access the host memory, so a copy to or from unmapped memory fails
// and does not crash the process.
bool copy_file_and_host(int fd, std::uint64_t offset, std::uint64_t host_address, std::uint64_t length_bytes,
                        bool is_to_host) {
    while (length_bytes > 0) {
        auto* const host_memory = reinterpret_cast<void*>(host_address);
        const ssize_t copied_bytes = is_to_host ? pread(fd, host_memory, length_bytes, static_cast<off_t>(offset))
                                                : pwrite(fd, host_memory, length_bytes, static_cast<off_t>(offset));
        if (copied_bytes <= 0) {
            return false;
        }
        offset += static_cast<std::uint64_t>(copied_bytes);
        host_address += static_cast<std::uint64_t>(copied_bytes);
        length_bytes -= static_cast<std::uint64_t>(copied_bytes);
    }
    return true;
}

// Parse the packets of a command buffer and append their copies to *copies. Return 0, EINVAL for a malformed packet or
// EOPNOTSUPP for a packet that the twin does not implement. On real hardware, only the driver of the first Gaudi checks
// packets at submission; later devices fail when they execute a wrong packet. The twin checks the
// packets of all generations at submission.
int parse_packets(std::span<const std::byte> unparsed_bytes, std::vector<LinearDma>* copies) {
    const bool is_gaudi1 = !generation_properties().has_virtual_memory;
    while (!unparsed_bytes.empty()) {
        // Every packet begins with these 8 bytes. The second word is the control word.
        std::uint32_t header[2] = {};
        if (unparsed_bytes.size() < sizeof header) {
            return EINVAL;
        }
        std::memcpy(header, unparsed_bytes.data(), sizeof header);
        const unsigned opcode = get_opcode(header[1]);
        if (opcode == opcode_nop) {
            unparsed_bytes = unparsed_bytes.subspan(sizeof header);
            continue;
        }
        if (opcode != opcode_lin_dma || unparsed_bytes.size() < sizeof(LinearDma)) {
            return opcode != opcode_lin_dma ? EOPNOTSUPP : EINVAL;
        }
        LinearDma packet{};
        std::memcpy(&packet, unparsed_bytes.data(), sizeof packet);
        if ((packet.ctl & ctl_memset) != 0) {
            return EOPNOTSUPP;
        }
        constexpr std::uint32_t required_bits = ctl_gaudi1_linear | ctl_gaudi1_reg_barrier;
        if (is_gaudi1 && (packet.ctl & required_bits) != required_bits) {
            return EINVAL;
        }
        packet.dst_addr &= is_gaudi1 ? destination_mask_gaudi1 : UINT64_MAX;
        copies->push_back(packet);
        unparsed_bytes = unparsed_bytes.subspan(sizeof packet);
    }
    return 0;
}

// Parse the packets of a chunk of a submission. On the first Gaudi the packets are in a command buffer of the driver.
// On later generations they are in host memory that the program has mapped. The program can change both kinds of
// memory, so copy the packets first.
int read_chunk(Device* device, const Chunk& chunk, std::vector<LinearDma>* copies) {
    if (chunk.queue_index >= dma_queue_count) {
        // The twin implements only the DMA queues. No generation has a queue index above 1024.
        return chunk.queue_index > 1024 ? EINVAL : EOPNOTSUPP;
    }
    // Later generations require chunk_flag_user_buffer, which says that the packets are in memory of the program. The
    // driver of the first Gaudi ignores the flag, because its queues accept only command buffers of the driver.
    const bool is_gaudi1 = !generation_properties().has_virtual_memory;
    if (!is_gaudi1 && (chunk.cs_chunk_flags & chunk_flag_user_buffer) == 0) {
        return EINVAL;
    }
    // The smallest packet is a header of 8 bytes.
    if (chunk.cb_size < 8 || chunk.cb_size > max_command_buffer_bytes) {
        return EINVAL;
    }
    std::vector<std::byte> packets(chunk.cb_size);
    if (is_gaudi1) {
        const auto buffer_entry = device->command_buffers.find(chunk.cb_handle);
        if (buffer_entry == device->command_buffers.end() || chunk.cb_size > buffer_entry->second.size_bytes ||
            pread(device->file.get(), packets.data(), packets.size(), static_cast<off_t>(chunk.cb_handle)) !=
                static_cast<ssize_t>(packets.size())) {
            return EINVAL;
        }
        return parse_packets(packets, copies);
    }
    // With the flag, cb_handle is the device address of the packets.
    auto next_mapping = device->mappings.upper_bound(chunk.cb_handle);
    if (next_mapping == device->mappings.begin()) {
        return EINVAL;
    }
    const auto& [mapping_address, mapping] = *std::prev(next_mapping);
    const std::uint64_t offset = chunk.cb_handle - mapping_address;
    if (mapping.allocation || offset > mapping.length_bytes || chunk.cb_size > mapping.length_bytes - offset) {
        return EINVAL;
    }
    std::memcpy(packets.data(), reinterpret_cast<const void*>(mapping.host_address + offset), packets.size());
    return parse_packets(packets, copies);
}

int submit_chunks(int fd, const SubmissionIn* in, SubmissionOut* out) {
    int error = 0;
    const DeviceRef device = in == nullptr || out == nullptr ? nullptr : find_device(fd, &error);
    if (!device) {
        return in == nullptr || out == nullptr ? EINVAL : error;
    }
    if (in->num_chunks_execute == 0 || in->num_chunks_execute > max_chunk_count || in->chunks_execute == nullptr) {
        return EINVAL;
    }
    if (in->num_chunks_restore != 0 || in->flags != 0) {
        return EOPNOTSUPP;
    }
    const std::span chunks(static_cast<const Chunk*>(in->chunks_execute), in->num_chunks_execute);
    std::vector<LinearDma> copies;
    {
        std::lock_guard lock(device->mutex);
        if (!device->is_operational) {
            return EBUSY;
        }
        for (const Chunk& chunk : chunks) {
            if (const int chunk_error = read_chunk(device.get(), chunk, &copies); chunk_error != 0) {
                return chunk_error;
            }
        }
    }
    *out = {device->submit(std::move(copies)), 0, 0};
    return 0;
}

} // namespace

bool Device::find_operand(std::uint64_t address, std::uint64_t length_bytes, CopyOperand* operand) {
    const Properties& device_properties = generation_properties();
    const auto next_mapping = mappings.upper_bound(address);
    if (next_mapping != mappings.begin()) {
        const auto& [mapping_address, mapping] = *std::prev(next_mapping);
        const std::uint64_t offset = address - mapping_address;
        if (offset <= mapping.length_bytes && length_bytes <= mapping.length_bytes - offset) {
            *operand = mapping.allocation ? CopyOperand{mapping.allocation->memfd.get(), offset}
                                          : CopyOperand{-1, mapping.host_address + offset};
            return true;
        }
    }
    if (device_properties.has_virtual_memory || address < device_properties.dram_user_base ||
        address > device_properties.dram_end() || length_bytes > device_properties.dram_end() - address) {
        return false;
    }
    if (!dram_memfd) {
        dram_memfd = Fd(make_device_memory(device_properties.dram_bytes));
    }
    *operand = {dram_memfd.get(), address - device_properties.dram_base};
    return static_cast<bool>(dram_memfd);
}

bool Device::run_copy(const LinearDma& copy) {
    CopyOperand target, source;
    if (!find_operand(copy.src_addr, copy.tsize, &source) || !find_operand(copy.dst_addr, copy.tsize, &target)) {
        return false;
    }
    if (source.fd >= 0 && target.fd >= 0) {
        return copy_between_files(target.fd, target.offset_or_address, source.fd, source.offset_or_address, copy.tsize);
    }
    if (source.fd < 0 && target.fd < 0) {
        return false; // the device does not copy from host to host
    }
    return target.fd < 0
               ? copy_file_and_host(source.fd, source.offset_or_address, target.offset_or_address, copy.tsize, true)
               : copy_file_and_host(target.fd, target.offset_or_address, source.offset_or_address, copy.tsize, false);
}

std::uint64_t Device::submit(std::vector<LinearDma> copies) {
    std::lock_guard lock(mutex);
    if (!job_thread_.joinable()) {
        job_thread_ = start_signal_blocking_thread([this] { run_jobs(); });
    }
    jobs_.push_back({++last_sequence_number, std::move(copies)});
    changed.notify_all();
    return last_sequence_number;
}

void Device::run_jobs() {
    std::unique_lock lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return is_stopping_ || !jobs_.empty(); });
        if (is_stopping_) {
            return;
        }
        const Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        sleep_random_delay();
        lock.lock();
        const bool has_succeeded =
            aborted_sequence_number == 0 &&
            std::all_of(job.copies.begin(), job.copies.end(), [this](const LinearDma& copy) { return run_copy(copy); });
        if (!has_succeeded && aborted_sequence_number == 0) {
            // A failed copy has the effect of a page fault: the driver resets the device, and this context becomes
            // unusable.
            aborted_sequence_number = job.sequence_number;
            is_operational = false;
        }
        completed_sequence_number = job.sequence_number;
        changed.notify_all();
    }
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_request_command_buffer(int fd, std::uint32_t size_bytes, std::uint64_t* handle) {
    return run_entry("hlthunk_request_command_buffer", [&] {
        int error = 0;
        const DeviceRef device = handle == nullptr ? nullptr : find_device(fd, &error);
        if (!device) {
            return handle == nullptr ? EINVAL : error;
        }
        if (size_bytes == 0 || size_bytes > max_command_buffer_bytes) {
            return EINVAL;
        }
        std::lock_guard lock(device->mutex);
        *handle = ++device->last_command_buffer_number * command_buffer_spacing_bytes;
        device->command_buffers.emplace(*handle, CommandBuffer{size_bytes});
        // Command buffers of two devices can have equal handles, so the table of open handles (model/ledger.hpp) gets
        // the combination of the device and the handle.
        record_open_handle("gaudi_command_buffer", reinterpret_cast<std::uint64_t>(device.get()) ^ *handle);
        return 0;
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_destroy_command_buffer(int fd, std::uint64_t handle) {
    return run_entry("hlthunk_destroy_command_buffer", [&] {
        int error = 0;
        const DeviceRef device = find_device(fd, &error);
        if (!device) {
            return error;
        }
        std::lock_guard lock(device->mutex);
        if (device->command_buffers.erase(handle) == 0) {
            return EINVAL;
        }
        static_cast<void>(
            record_closed_handle("gaudi_command_buffer", reinterpret_cast<std::uint64_t>(device.get()) ^ handle));
        return 0;
    });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_command_submission(int fd, SubmissionIn* in, SubmissionOut* out) {
    return run_entry("hlthunk_command_submission", [&] { return submit_chunks(fd, in, out); });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_command_submission_timeout(int fd, SubmissionIn* in, SubmissionOut* out,
                                                            std::uint32_t /*timeout_s*/) {
    return run_entry("hlthunk_command_submission_timeout", [&] { return submit_chunks(fd, in, out); });
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_wait_for_cs(int fd, std::uint64_t sequence_number, std::uint64_t timeout_us,
                                             std::uint32_t* status) {
    return run_entry("hlthunk_wait_for_cs", [&] {
        int error = 0;
        const DeviceRef device = status == nullptr ? nullptr : find_device(fd, &error);
        if (!device) {
            return status == nullptr ? EINVAL : error;
        }
        std::unique_lock lock(device->mutex);
        if (sequence_number == 0 || sequence_number > device->last_sequence_number) {
            return EINVAL;
        }
        const auto timeout = std::chrono::microseconds(std::min(timeout_us, max_wait_us));
        // wait_for would use a clock that ThreadSanitizer of older compilers does not support.
        const auto deadline = std::chrono::system_clock::now() + timeout;
        if (!device->changed.wait_until(lock, deadline,
                                        [&] { return device->completed_sequence_number >= sequence_number; })) {
            *status = wait_busy;
            return 0;
        }
        const bool is_aborted =
            device->aborted_sequence_number != 0 && sequence_number >= device->aborted_sequence_number;
        *status = is_aborted ? wait_aborted : wait_completed;
        return is_aborted ? EIO : 0;
    });
}

GDRKIT_HLTHUNK_ENTRY bool hlthunk_is_device_idle(int fd) {
    int error = 0;
    const DeviceRef device = configuration_error().empty() ? find_device(fd, &error) : nullptr;
    if (!device) {
        return false;
    }
    std::lock_guard lock(device->mutex);
    return device->completed_sequence_number == device->last_sequence_number;
}

} // namespace gdrkit::twin::gaudi
