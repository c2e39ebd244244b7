// Tests of command submissions: delays, order, both kinds of command buffers, and a copy to an unmapped address.
#include <sys/mman.h>

#include "hlthunk_library.hpp"

using namespace gdrkit::twin::gaudi;

namespace {

constexpr u64 page = 4096;
constexpr std::uint32_t linear = packet_lin_dma << 24;

struct DeviceBuffers {
    LinearDma packet;
    char bytes[3 * page];
};

void test_user_command_buffer(int fd) {
    auto* const stage = static_cast<DeviceBuffers*>(
        mmap(nullptr, sizeof(DeviceBuffers), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    const u64 host = map_host(fd, stage, sizeof(DeviceBuffers));
    const u64 handle = allocate(fd, page), device = map(fd, handle);
    const u64 bytes = host + offsetof(DeviceBuffers, bytes);
    std::memset(stage->bytes, 7, 100);
    std::uint32_t status = 9;
    stage->packet = {100, linear, bytes, device + 50};
    const u64 first = submit_mapped(fd, &stage->packet, host);
    stage->packet = {100, linear, device + 50, bytes + page};
    const u64 second = submit_mapped(fd, &stage->packet, host, 4);
    CHECK(second == first + 1);
    CHECK(wait(fd, second, &status) == 0 && status == wait_completed);
    CHECK(wait(fd, first, &status, 0) == 0 && status == wait_completed);
    CHECK(stage->bytes[page] == 7 && stage->bytes[page + 99] == 7 && stage->bytes[page + 100] == 0);
    CHECK(wait(fd, second + 1, &status) == -EINVAL && wait(fd, 0, &status) == -EINVAL);
    CHECK(wait(fd, first, nullptr) == -EINVAL);

    Chunk chunk{host, 0, sizeof(LinearDma), 0, 0, {}};
    SubmissionIn in{nullptr, &chunk, 0, 1, 0};
    SubmissionOut out{};
    CHECK(hl("hlthunk_command_submission", fd, &in, &out) == -EINVAL); // not flagged as a buffer of the program
    chunk.cs_chunk_flags = chunk_user_buffer;
    chunk.queue_index = 100;
    CHECK(hl("hlthunk_command_submission", fd, &in, &out) == -EOPNOTSUPP);
    chunk.queue_index = 0;
    chunk.cb_handle = 12345;
    CHECK(hl("hlthunk_command_submission", fd, &in, &out) == -EINVAL);
    in.num_chunks_execute = 0;
    CHECK(hl("hlthunk_command_submission", fd, &in, &out) == -EINVAL);

    // Memory that the program unmaps before the copy runs is not accessible to the device.
    stage->packet = {8, linear, bytes, device + (u64{1} << 40)};
    const u64 lost = submit_mapped(fd, &stage->packet, host);
    CHECK(wait(fd, lost, &status) == -EIO && status == wait_aborted);
    CHECK(allocate(fd, page) == 0 && errno == EBUSY && unmap(fd, device) == -EBUSY && release(fd, handle) == -EBUSY);
    CHECK(export_mapped(fd, device, page) == -EBUSY);
    CHECK(hl("hlthunk_get_device_status_info", fd) == device_malfunction);
    munmap(stage, sizeof(DeviceBuffers));
}

void test_driver_command_buffer(int fd) {
    u64 handle = 0;
    CHECK(hl("hlthunk_request_command_buffer", fd, 4096U, &handle) == 0);
    auto* const packet = static_cast<LinearDma*>(
        mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(handle)));
    CHECK(packet != MAP_FAILED);
    auto* const bytes =
        static_cast<char*>(mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    const u64 host = map_host(fd, bytes, 2 * page);
    HardwareInfo info{};
    CHECK(hl("hlthunk_get_hw_ip_info", fd, &info) == 0);
    std::memset(bytes, 5, 100);
    Chunk chunk{handle, 0, sizeof(LinearDma), 0, 0, {}};
    SubmissionIn in{nullptr, &chunk, 0, 1, 0};
    SubmissionOut out{};
    *packet = {100, linear, host, info.dram_base_address};
    CHECK(hl("hlthunk_command_submission", fd, &in, &out) == -EINVAL); // two bits of the control word must be set
    constexpr std::uint32_t control = linear | ctl_gaudi1_linear | ctl_gaudi1_reg_barrier;
    std::uint32_t status = 9;
    *packet = {100, control, host, info.dram_base_address};
    CHECK(hl("hlthunk_command_submission", fd, &in, &out) == 0 && wait(fd, out.seq, &status) == 0);
    *packet = {100, control, info.dram_base_address, host + page};
    CHECK(hl("hlthunk_command_submission", fd, &in, &out) == 0 && wait(fd, out.seq, &status) == 0);
    CHECK(status == wait_completed && bytes[page] == 5 && bytes[page + 99] == 5 && bytes[page + 100] == 0);
    chunk.cb_handle = handle + page;
    CHECK(hl("hlthunk_command_submission", fd, &in, &out) == -EINVAL);
    munmap(packet, page);
    CHECK(hl("hlthunk_destroy_command_buffer", fd, handle) == 0 &&
          hl("hlthunk_destroy_command_buffer", fd, handle) == -EINVAL);
    CHECK(unmap(fd, host) == 0);
    munmap(bytes, 2 * page);
}

} // namespace

int main() {
    const int fd = open_first();
    if (hl("hlthunk_get_device_name_from_fd", fd) == gaudi1) {
        test_driver_command_buffer(fd);
    } else {
        test_user_command_buffer(fd);
    }
    CHECK(hl("hlthunk_close", fd) == 0);
    // A failed device can be opened again after its program has closed it.
    const int again = open_first();
    CHECK(hl("hlthunk_get_device_status_info", again) == device_operational && hl("hlthunk_close", again) == 0);
    CHECK(state().find("\"handles\":{}") != std::string::npos);
}
