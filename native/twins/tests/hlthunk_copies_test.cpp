// Tests of the software twin of libhl-thunk (the library of Intel Gaudi accelerators): submissions of copy commands.
// The twin executes them in order and with delays. The commands are in a buffer of the program (Gaudi2 and later) or of
// the driver (first Gaudi). A copy to an unmapped address makes the device fail.
#include <sys/mman.h>

#include "hlthunk_library.hpp"

using namespace gdrkit::twin::gaudi;

namespace {

constexpr u64 page_bytes = 4096;
constexpr std::uint32_t linear_dma_header = opcode_lin_dma << 24; // the opcode is in bits 24 to 31

// Host memory that is mapped for the device: a packet and the data that it copies. The members of a packet are the
// number of bytes, the control word, and the addresses of the source and the destination.
struct StagingBuffer {
    LinearDma packet;
    char bytes[3 * page_bytes];
};

void test_copies_from_user_command_buffer(int fd) {
    auto* const staging = static_cast<StagingBuffer*>(
        mmap(nullptr, sizeof(StagingBuffer), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    const u64 staging_address = map_host(fd, staging, sizeof(StagingBuffer));
    const u64 handle = allocate(fd, page_bytes), device_address = map_memory(fd, handle);
    const u64 staged_bytes_address = staging_address + offsetof(StagingBuffer, bytes);
    std::memset(staging->bytes, 7, 100);
    std::uint32_t status = 9; // not a WaitStatus
    staging->packet = {100, linear_dma_header, staged_bytes_address, device_address + 50};
    const u64 first_sequence = submit_mapped(fd, &staging->packet, staging_address);
    staging->packet = {100, linear_dma_header, device_address + 50, staged_bytes_address + page_bytes};
    const u64 second_sequence = submit_mapped(fd, &staging->packet, staging_address, 4);
    CHECK(second_sequence == first_sequence + 1);
    CHECK(wait_for_submission(fd, second_sequence, &status) == 0 && status == wait_completed);
    CHECK(wait_for_submission(fd, first_sequence, &status, 0) == 0 && status == wait_completed);
    CHECK(staging->bytes[page_bytes] == 7 && staging->bytes[page_bytes + 99] == 7 &&
          staging->bytes[page_bytes + 100] == 0);
    // These sequence numbers belong to no submission.
    CHECK(wait_for_submission(fd, second_sequence + 1, &status) == -EINVAL &&
          wait_for_submission(fd, 0, &status) == -EINVAL);
    CHECK(wait_for_submission(fd, first_sequence, nullptr) == -EINVAL);

    Chunk chunk{staging_address, 0, sizeof(LinearDma), 0, 0, {}};
    SubmissionIn in{nullptr, &chunk, 0, 1, 0};
    SubmissionOut out{};
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) ==
          -EINVAL); // cs_chunk_flags lacks chunk_flag_user_buffer
    chunk.cs_chunk_flags = chunk_flag_user_buffer;
    chunk.queue_index = 100; // the twin implements only the queues 0 to 7
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) == -EOPNOTSUPP);
    chunk.queue_index = 0;
    chunk.cb_handle = 12345; // not a mapped address
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) == -EINVAL);
    in.num_chunks_execute = 0; // a submission without commands
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) == -EINVAL);

    // A copy to a device address that is not mapped aborts the submission, and the driver resets the device.
    staging->packet = {8, linear_dma_header, staged_bytes_address, device_address + (u64{1} << 40)};
    const u64 aborted_sequence = submit_mapped(fd, &staging->packet, staging_address);
    CHECK(wait_for_submission(fd, aborted_sequence, &status) == -EIO && status == wait_aborted);
    // Until the program closes the device, all calls for its memory fail.
    CHECK(allocate(fd, page_bytes) == 0 && errno == EBUSY && unmap_memory(fd, device_address) == -EBUSY &&
          free_memory(fd, handle) == -EBUSY);
    CHECK(export_mapped(fd, device_address, page_bytes) == -EBUSY);
    CHECK(call_library("hlthunk_get_device_status_info", fd) == device_malfunction);
    munmap(staging, sizeof(StagingBuffer));
}

void test_copies_from_driver_command_buffer(int fd) {
    u64 handle = 0;
    CHECK(call_library("hlthunk_request_command_buffer", fd, 4096U, &handle) == 0);
    auto* const packet = static_cast<LinearDma*>(
        mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(handle)));
    CHECK(packet != MAP_FAILED);
    auto* const host_bytes =
        static_cast<char*>(mmap(nullptr, 2 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    const u64 host_address = map_host(fd, host_bytes, 2 * page_bytes);
    HardwareInfo hardware_info{};
    CHECK(call_library("hlthunk_get_hw_ip_info", fd, &hardware_info) == 0);
    std::memset(host_bytes, 5, 100);
    Chunk chunk{handle, 0, sizeof(LinearDma), 0, 0, {}};
    SubmissionIn in{nullptr, &chunk, 0, 1, 0};
    SubmissionOut out{};
    *packet = {100, linear_dma_header, host_address, hardware_info.dram_base_address};
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) ==
          -EINVAL); // the control word lacks the bits `linear` and `reg_barrier`
    constexpr std::uint32_t control = linear_dma_header | ctl_gaudi1_linear | ctl_gaudi1_reg_barrier;
    std::uint32_t status = 9;
    *packet = {100, control, host_address, hardware_info.dram_base_address};
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) == 0 &&
          wait_for_submission(fd, out.seq, &status) == 0);
    *packet = {100, control, hardware_info.dram_base_address, host_address + page_bytes};
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) == 0 &&
          wait_for_submission(fd, out.seq, &status) == 0);
    CHECK(status == wait_completed && host_bytes[page_bytes] == 5 && host_bytes[page_bytes + 99] == 5 &&
          host_bytes[page_bytes + 100] == 0);
    chunk.cb_handle = handle + page_bytes; // not a handle of a command buffer
    CHECK(call_library("hlthunk_command_submission", fd, &in, &out) == -EINVAL);
    munmap(packet, page_bytes);
    CHECK(call_library("hlthunk_destroy_command_buffer", fd, handle) == 0 &&
          call_library("hlthunk_destroy_command_buffer", fd, handle) == -EINVAL);
    CHECK(unmap_memory(fd, host_address) == 0);
    munmap(host_bytes, 2 * page_bytes);
}

} // namespace

int main() {
    const int fd = open_first_device();
    if (call_library("hlthunk_get_device_name_from_fd", fd) == gaudi1) {
        test_copies_from_driver_command_buffer(fd);
    } else {
        test_copies_from_user_command_buffer(fd);
    }
    CHECK(call_library("hlthunk_close", fd) == 0);
    // A failed device can be opened again after its program has closed it.
    const int reopened_fd = open_first_device();
    CHECK(call_library("hlthunk_get_device_status_info", reopened_fd) == device_operational &&
          call_library("hlthunk_close", reopened_fd) == 0);
    CHECK(read_ledger().find("\"handles\":{}") != std::string::npos);
}
