// Tests of the software twin of libcufile (GPUDirect Storage): asynchronous reads and writes in a CUDA stream.
#include <future>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page_bytes = 4096;

// Arguments and result of an asynchronous call. The library reads the arguments when the stream reaches the call,
// unless the program declared them as fixed (cuFileStreamRegister).
struct AsyncArguments {
    std::size_t length_bytes = page_bytes;
    off_t file_offset = 0, buffer_offset = 0;
    ssize_t result = -1;
};

// Queue a transfer between the file and the memory of `test_file` in a stream. Return the status of the call.
int start_async(const char* symbol, const TestFile& test_file, u64 stream, AsyncArguments* arguments) {
    return call_for_status(symbol, test_file.file, to_pointer(test_file.memory), &arguments->length_bytes,
                           &arguments->file_offset, &arguments->buffer_offset, &arguments->result, stream);
}

u64 create_stream() {
    u64 stream = 0;
    CHECK(cuda::call_driver("cuStreamCreate", &stream, unsigned{cuda::stream_non_blocking}) == cuda::success);
    return stream;
}

// Blocks a stream: work that is queued after the gate does not run before open().
class Gate {
public:
    explicit Gate(u64 stream) {
        CHECK(cuda::call_driver("cuLaunchHostFunc", stream, &Gate::wait, static_cast<void*>(this)) == cuda::success);
    }
    void open() { opened_.set_value(); }

private:
    static void wait(void* gate) { static_cast<Gate*>(gate)->opened_.get_future().wait(); }
    std::promise<void> opened_;
};

void synchronize_stream(u64 stream) {
    CHECK(cuda::call_driver("cuStreamSynchronize", stream) == cuda::success);
}

void test_transfers_run_in_stream_order() {
    const TestFile test_file;
    const u64 stream = create_stream();
    AsyncArguments read_arguments, write_arguments;
    write_arguments.file_offset = 8 * page_bytes;
    CHECK(start_async("cuFileReadAsync", test_file, stream, &read_arguments) == success);
    CHECK(start_async("cuFileWriteAsync", test_file, stream, &write_arguments) == success);
    synchronize_stream(stream);
    CHECK(read_arguments.result == page_bytes && write_arguments.result == page_bytes);
    const auto file_content = test_file.file_content();
    // The stream first read the data into device memory and then wrote it to the file.
    CHECK(std::vector(file_content.begin() + 8 * page_bytes, file_content.begin() + 9 * page_bytes) ==
          std::vector(test_file.initial_bytes.begin(), test_file.initial_bytes.begin() + page_bytes));
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_unfixed_arguments_are_read_late() {
    const TestFile test_file;
    const u64 stream = create_stream();
    AsyncArguments arguments;
    Gate first_gate(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    arguments.file_offset = 4 * page_bytes;
    first_gate.open();
    synchronize_stream(stream);
    CHECK(cuda::read_device(test_file.memory, page_bytes) ==
          std::vector(test_file.initial_bytes.begin() + 4 * page_bytes,
                      test_file.initial_bytes.begin() + 5 * page_bytes));
    // The flags declare all arguments of later calls in this stream as fixed, so the library reads them at the call.
    EXPECT_STATUS(success, "cuFileStreamRegister", stream, unsigned{stream_flags_mask});
    AsyncArguments fixed_arguments;
    Gate second_gate(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &fixed_arguments) == success);
    fixed_arguments.file_offset = 4 * page_bytes;
    second_gate.open();
    synchronize_stream(stream);
    CHECK(cuda::read_device(test_file.memory, page_bytes) ==
          std::vector(test_file.initial_bytes.begin(), test_file.initial_bytes.begin() + page_bytes));
    EXPECT_STATUS(success, "cuFileStreamDeregister", stream);
    // A second deregistration aborts the process.
    const int status = cuda::run_in_child([stream] { call_for_status("cuFileStreamDeregister", stream); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_driver_close_waits_for_stream() {
    const TestFile test_file;
    const u64 stream = create_stream();
    AsyncArguments arguments;
    Gate gate(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    EXPECT_STATUS(driver_closing, "cuFileDriverClose");
    gate.open();
    synchronize_stream(stream);
    CHECK(arguments.result == page_bytes);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_result_is_zero_until_done() {
    const TestFile test_file;
    const u64 stream = create_stream();
    AsyncArguments arguments;
    Gate gate(stream);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    CHECK(arguments.result == 0);
    gate.open();
    synchronize_stream(stream);
    CHECK(arguments.result == page_bytes);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_result_is_enomem_without_context() {
    const TestFile test_file;
    const u64 stream = create_stream();
    AsyncArguments arguments;
    // A new thread has no current context.
    std::thread([&] {
        EXPECT_STATUS(success, "cuFileStreamRegister", stream, 0U);
        CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
        CHECK(arguments.result == -ENOMEM);
        EXPECT_STATUS(success, "cuFileStreamDeregister", stream);
    }).join();
    synchronize_stream(stream);
    CHECK(arguments.result == -ENOMEM);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
}

void test_failure_is_in_result() {
    const TestFile test_file;
    const u64 stream = create_stream();
    AsyncArguments arguments;
    // The status 5 is EIO, and 5010 is CU_FILE_NVFS_DRIVER_ERROR. The result of a failed call is the negative status.
    set_fault_plan("cufile.async_io call=1 status=5\ncufile.async_io call=2 status=5010");
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    synchronize_stream(stream);
    CHECK(arguments.result == -EIO);
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    synchronize_stream(stream);
    CHECK(arguments.result == -5010);
    EXPECT_STATUS(invalid_value, "cuFileStreamRegister", stream, stream_flags_mask + 1U);
    EXPECT_STATUS(invalid_value, "cuFileStreamRegister", u64{0x1234567}, 0U);
    EXPECT_STATUS(invalid_value, "cuFileStreamDeregister", u64{0x1234567});
    CHECK(start_async("cuFileReadAsync", test_file, u64{0x1234567}, &arguments) == invalid_value);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
}

std::vector<unsigned char> copy_page(const std::vector<unsigned char>& bytes, std::size_t page_index) {
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(page_index * page_bytes);
    return {begin, begin + page_bytes};
}

// Start two transfers, each in its own stream, and let the second transfer end before the first.
void run_both_transfers(const char* symbol, const TestFile& test_file, AsyncArguments* first_arguments,
                        AsyncArguments* second_arguments) {
    const u64 first_stream = create_stream(), second_stream = create_stream();
    Gate gate(first_stream);
    CHECK(start_async(symbol, test_file, first_stream, first_arguments) == success);
    CHECK(start_async(symbol, test_file, second_stream, second_arguments) == success);
    synchronize_stream(second_stream);
    gate.open();
    synchronize_stream(first_stream);
    CHECK(first_arguments->result == page_bytes && second_arguments->result == page_bytes);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", first_stream) == cuda::success);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", second_stream) == cuda::success);
}

// In compat mode, real cuFile (1.15) mixes up two transfers in different streams that use one registered buffer at the
// same time: the second transfer moves the bytes of the first. The twin does the same.
void test_streams_mix_up_the_bytes_of_one_registration() {
    const TestFile test_file;
    EXPECT_STATUS(success, "cuFileBufRegister", static_cast<const void*>(to_pointer(test_file.memory)),
                  TestFile::length_bytes, 0);
    AsyncArguments first_arguments{page_bytes, 4 * page_bytes, 0},
        second_arguments{page_bytes, 5 * page_bytes, page_bytes};
    run_both_transfers("cuFileReadAsync", test_file, &first_arguments, &second_arguments);
    CHECK(copy_page(test_file.device_content(), 0) == copy_page(test_file.initial_bytes, 4));
    CHECK(copy_page(test_file.device_content(), 1) == copy_page(test_file.initial_bytes, 4));
    // In one stream, the second transfer starts after the first, and both transfer the right bytes.
    const u64 stream = create_stream();
    for (AsyncArguments* arguments : {&first_arguments, &second_arguments}) {
        CHECK(start_async("cuFileReadAsync", test_file, stream, arguments) == success);
    }
    synchronize_stream(stream);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
    CHECK(copy_page(test_file.device_content(), 0) == copy_page(test_file.initial_bytes, 4));
    CHECK(copy_page(test_file.device_content(), 1) == copy_page(test_file.initial_bytes, 5));
    AsyncArguments first_write{page_bytes, 8 * page_bytes, 0}, second_write{page_bytes, 9 * page_bytes, page_bytes};
    run_both_transfers("cuFileWriteAsync", test_file, &first_write, &second_write);
    CHECK(copy_page(test_file.file_content(), 8) == copy_page(test_file.initial_bytes, 4));
    CHECK(copy_page(test_file.file_content(), 9) == copy_page(test_file.initial_bytes, 4));
    EXPECT_STATUS(success, "cuFileBufDeregister", static_cast<const void*>(to_pointer(test_file.memory)));
}

void test_streams_with_a_direct_path_keep_their_bytes() {
    const TestFile test_file;
    EXPECT_STATUS(success, "cuFileBufRegister", static_cast<const void*>(to_pointer(test_file.memory)),
                  TestFile::length_bytes, 0);
    set_fault_plan("cufile.route call=* route=p2p");
    AsyncArguments first_arguments{page_bytes, 4 * page_bytes, 0},
        second_arguments{page_bytes, 5 * page_bytes, page_bytes};
    run_both_transfers("cuFileReadAsync", test_file, &first_arguments, &second_arguments);
    CHECK(copy_page(test_file.device_content(), 0) == copy_page(test_file.initial_bytes, 4));
    CHECK(copy_page(test_file.device_content(), 1) == copy_page(test_file.initial_bytes, 5));
    EXPECT_STATUS(success, "cuFileBufDeregister", static_cast<const void*>(to_pointer(test_file.memory)));
}

// In compat mode, a transfer with a buffer offset fails if the buffer is not registered.
void test_offset_in_unregistered_memory_is_eio() {
    const TestFile test_file;
    const u64 stream = create_stream();
    for (const char* symbol : {"cuFileReadAsync", "cuFileWriteAsync"}) {
        AsyncArguments arguments{page_bytes, 0, page_bytes};
        CHECK(start_async(symbol, test_file, stream, &arguments) == success);
        synchronize_stream(stream);
        CHECK(arguments.result == -EIO);
        // With a direct path, the transfer works.
        set_fault_plan("cufile.route call=* route=nvfs");
        CHECK(start_async(symbol, test_file, stream, &arguments) == success);
        synchronize_stream(stream);
        CHECK(arguments.result == page_bytes);
        set_fault_plan("");
    }
    // A pointer into the middle of the memory, without an offset, works even in compat mode.
    AsyncArguments arguments;
    CHECK(call_for_status("cuFileReadAsync", test_file.file, to_pointer(test_file.memory + 2 * page_bytes),
                          &arguments.length_bytes, &arguments.file_offset, &arguments.buffer_offset, &arguments.result,
                          stream) == success);
    synchronize_stream(stream);
    CHECK(arguments.result == page_bytes);
    CHECK(copy_page(test_file.device_content(), 2) == copy_page(test_file.initial_bytes, 0));
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
}

// Query the properties of the driver while a read of `test_file` waits in a stream. Return the result of the read.
ssize_t read_during_query_of_properties(const TestFile& test_file) {
    const u64 stream = create_stream();
    Gate gate(stream);
    AsyncArguments arguments;
    CHECK(start_async("cuFileReadAsync", test_file, stream, &arguments) == success);
    DriverProperties properties;
    EXPECT_STATUS(success, "cuFileDriverGetProperties", &properties);
    gate.open();
    synchronize_stream(stream);
    CHECK(cuda::call_driver("cuStreamDestroy_v2", stream) == cuda::success);
    return arguments.result;
}

void test_properties_end_transfers_in_progress() {
    const TestFile test_file;
    // cuFileDriverGetProperties makes the transfers that wait in streams fail.
    CHECK(read_during_query_of_properties(test_file) == -EIO);
    // Real cuFile does this only in compat mode. With a direct path, the transfers continue.
    set_fault_plan("cufile.route call=* route=p2p");
    CHECK(read_during_query_of_properties(test_file) == page_bytes);
    set_fault_plan("");
}

} // namespace

int main() {
    test_transfers_run_in_stream_order();
    test_unfixed_arguments_are_read_late();
    test_driver_close_waits_for_stream();
    test_result_is_zero_until_done();
    test_result_is_enomem_without_context();
    test_failure_is_in_result();
    test_streams_mix_up_the_bytes_of_one_registration();
    test_streams_with_a_direct_path_keep_their_bytes();
    test_offset_in_unregistered_memory_is_eio();
    test_properties_end_transfers_in_progress();
}
