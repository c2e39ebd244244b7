// Tests of asynchronous reads and writes in a CUDA stream.
#include <future>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page = 4096;

// Arguments and result of an asynchronous call. The library reads the arguments when the stream reaches the call.
struct AsyncArguments {
    std::size_t length_bytes = page;
    off_t file_offset = 0, buffer_offset = 0;
    ssize_t result = -1;
};

int start_async(const char* symbol, const TestFile& test_file, u64 stream, AsyncArguments* arguments) {
    return call_control(symbol, test_file.file, pointer(test_file.memory), &arguments->length_bytes,
                        &arguments->file_offset, &arguments->buffer_offset, &arguments->result, stream);
}

u64 make_stream() {
    u64 stream = 0;
    CHECK(cuda::cu("cuStreamCreate", &stream, 1U) == cuda::success);
    return stream;
}

// Blocks a stream until open().
class Gate {
public:
    explicit Gate(u64 stream) {
        CHECK(cuda::cu("cuLaunchHostFunc", stream, &Gate::wait, static_cast<void*>(this)) == cuda::success);
    }
    void open() { opened_.set_value(); }

private:
    static void wait(void* gate) { static_cast<Gate*>(gate)->opened_.get_future().wait(); }
    std::promise<void> opened_;
};

void synchronize(u64 stream) {
    CHECK(cuda::cu("cuStreamSynchronize", stream) == cuda::success);
}

void test_transfers_in_stream_order() {
    const TestFile test_file;
    const u64 stream = make_stream();
    AsyncArguments read, write;
    write.file_offset = 8 * page;
    CHECK(start_async("cuFileReadAsync", test_file, stream, &read) == success);
    CHECK(start_async("cuFileWriteAsync", test_file, stream, &write) == success);
    synchronize(stream);
    CHECK(read.result == page && write.result == page);
    const auto disk = test_file.on_disk();
    // The data that was read first was then written.
    CHECK(std::vector(disk.begin() + 8 * page, disk.begin() + 9 * page) ==
          std::vector(test_file.bytes.begin(), test_file.bytes.begin() + page));
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_unfixed_arguments_are_read_late() {
    const TestFile test_file;
    const u64 stream = make_stream();
    AsyncArguments arguments;
    Gate first(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    arguments.file_offset = 4 * page;
    first.open();
    synchronize(stream);
    CHECK(cuda::read_device(test_file.memory, page) ==
          std::vector(test_file.bytes.begin() + 4 * page, test_file.bytes.begin() + 5 * page));
    EXPECT_STATUS(success, "cuFileStreamRegister", stream, 15U);
    AsyncArguments fixed;
    Gate second(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &fixed) == success);
    fixed.file_offset = 4 * page;
    second.open();
    synchronize(stream);
    CHECK(cuda::read_device(test_file.memory, page) ==
          std::vector(test_file.bytes.begin(), test_file.bytes.begin() + page));
    EXPECT_STATUS(success, "cuFileStreamDeregister", stream);
    const int status = cuda::status_of_child([stream] { call_control("cuFileStreamDeregister", stream); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_driver_close_waits_for_stream() {
    const TestFile test_file;
    const u64 stream = make_stream();
    AsyncArguments arguments;
    Gate gate(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    EXPECT_STATUS(driver_closing, "cuFileDriverClose");
    gate.open();
    synchronize(stream);
    CHECK(arguments.result == page);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_result_is_zero_until_done() {
    const TestFile test_file;
    const u64 stream = make_stream();
    AsyncArguments arguments;
    Gate gate(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    CHECK(arguments.result == 0);
    gate.open();
    synchronize(stream);
    CHECK(arguments.result == page);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_result_without_context() {
    const TestFile test_file;
    const u64 stream = make_stream();
    AsyncArguments arguments;
    std::thread([&] {
        EXPECT_STATUS(success, "cuFileStreamRegister", stream, 0U);
        CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
        CHECK(arguments.result == -ENOMEM);
        EXPECT_STATUS(success, "cuFileStreamDeregister", stream);
    }).join();
    synchronize(stream);
    CHECK(arguments.result == -ENOMEM);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_failure_is_in_result() {
    const TestFile test_file;
    const u64 stream = make_stream();
    AsyncArguments arguments;
    set_fault_plan("cufile.async_io call=1 status=5\ncufile.async_io call=2 status=5010");
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    synchronize(stream);
    CHECK(arguments.result == -EIO);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    synchronize(stream);
    CHECK(arguments.result == -5010);
    EXPECT_STATUS(invalid_value, "cuFileStreamRegister", stream, 16U);
    EXPECT_STATUS(invalid_value, "cuFileStreamRegister", u64{0x1234567}, 0U);
    EXPECT_STATUS(invalid_value, "cuFileStreamDeregister", u64{0x1234567});
    CHECK(start_async("cuFileReadAsync", test_file, u64{0x1234567}, &arguments) == invalid_value);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

} // namespace

int main() {
    test_transfers_in_stream_order();
    test_unfixed_arguments_are_read_late();
    test_driver_close_waits_for_stream();
    test_result_is_zero_until_done();
    test_result_without_context();
    test_failure_is_in_result();
}
