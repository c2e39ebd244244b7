// Tests of asynchronous reads and writes in a CUDA stream.
#include <future>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page_bytes = 4096;

// Arguments and result of an asynchronous call. The library reads the arguments when the stream reaches the call.
struct AsyncArguments {
    std::size_t length_bytes = page_bytes;
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

// Blocks a stream: work that is queued after the gate does not run before open().
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

void test_transfers_run_in_stream_order() {
    const TestFile test_file;
    const u64 stream = make_stream();
    AsyncArguments read_arguments, write_arguments;
    write_arguments.file_offset = 8 * page_bytes;
    CHECK(start_async("cuFileReadAsync", test_file, stream, &read_arguments) == success);
    CHECK(start_async("cuFileWriteAsync", test_file, stream, &write_arguments) == success);
    synchronize(stream);
    CHECK(read_arguments.result == page_bytes && write_arguments.result == page_bytes);
    const auto file_content = test_file.file_content();
    // The stream first read the data into device memory and then wrote it to the file.
    CHECK(std::vector(file_content.begin() + 8 * page_bytes, file_content.begin() + 9 * page_bytes) ==
          std::vector(test_file.bytes.begin(), test_file.bytes.begin() + page_bytes));
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_unfixed_arguments_are_read_late() {
    const TestFile test_file;
    const u64 stream = make_stream();
    AsyncArguments arguments;
    Gate first_gate(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    arguments.file_offset = 4 * page_bytes;
    first_gate.open();
    synchronize(stream);
    CHECK(cuda::read_device(test_file.memory, page_bytes) ==
          std::vector(test_file.bytes.begin() + 4 * page_bytes, test_file.bytes.begin() + 5 * page_bytes));
    // All arguments of calls in this stream are fixed.
    EXPECT_STATUS(success, "cuFileStreamRegister", stream, unsigned{stream_flags_mask});
    AsyncArguments fixed_arguments;
    Gate second_gate(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &fixed_arguments) == success);
    fixed_arguments.file_offset = 4 * page_bytes;
    second_gate.open();
    synchronize(stream);
    CHECK(cuda::read_device(test_file.memory, page_bytes) ==
          std::vector(test_file.bytes.begin(), test_file.bytes.begin() + page_bytes));
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
    CHECK(arguments.result == page_bytes);
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
    CHECK(arguments.result == page_bytes);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_result_is_enomem_without_context() {
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
    EXPECT_STATUS(invalid_value, "cuFileStreamRegister", stream, stream_flags_mask + 1U);
    EXPECT_STATUS(invalid_value, "cuFileStreamRegister", u64{0x1234567}, 0U);
    EXPECT_STATUS(invalid_value, "cuFileStreamDeregister", u64{0x1234567});
    CHECK(start_async("cuFileReadAsync", test_file, u64{0x1234567}, &arguments) == invalid_value);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

} // namespace

int main() {
    test_transfers_run_in_stream_order();
    test_unfixed_arguments_are_read_late();
    test_driver_close_waits_for_stream();
    test_result_is_zero_until_done();
    test_result_is_enomem_without_context();
    test_failure_is_in_result();
}
