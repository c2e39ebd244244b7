// Reads and writes in the order of a CUDA stream.
#include <future>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page = 4096;

// What an asynchronous call reads and writes in its turn.
struct Cells {
    std::size_t length_bytes = page;
    off_t file_offset = 0, buffer_offset = 0;
    ssize_t result = -1;
};

int begin(const char* symbol, const Scene& scene, u64 stream, Cells* cells) {
    return cf(symbol, scene.file, pointer(scene.memory), &cells->length_bytes, &cells->file_offset,
              &cells->buffer_offset, &cells->result, stream);
}

u64 make_stream() {
    u64 stream = 0;
    CHECK(cuda::cu("cuStreamCreate", &stream, 1U) == cuda::success);
    return stream;
}

// What a stream waits at until the test lets it go on.
class Gate {
public:
    explicit Gate(u64 stream) {
        CHECK(cuda::cu("cuLaunchHostFunc", stream, &Gate::wait, static_cast<void*>(this)) == cuda::success);
    }
    void open() { let_go_.set_value(); }

private:
    static void wait(void* gate) { static_cast<Gate*>(gate)->let_go_.get_future().wait(); }
    std::promise<void> let_go_;
};

void synchronize(u64 stream) {
    CHECK(cuda::cu("cuStreamSynchronize", stream) == cuda::success);
}

void transfers_keep_the_order_of_the_stream() {
    const Scene scene;
    const u64 stream = make_stream();
    Cells read, write;
    write.file_offset = 8 * page;
    CHECK(begin("cuFileReadAsync", scene, stream, &read) == success);
    CHECK(begin("cuFileWriteAsync", scene, stream, &write) == success);
    synchronize(stream);
    CHECK(read.result == page && write.result == page);
    const auto disk = scene.on_disk();
    // What was read first was then written.
    CHECK(std::vector(disk.begin() + 8 * page, disk.begin() + 9 * page) ==
          std::vector(scene.bytes.begin(), scene.bytes.begin() + page));
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void what_is_not_fixed_is_read_in_its_turn() {
    const Scene scene;
    const u64 stream = make_stream();
    Cells cells;
    Gate first(stream);
    CHECK(begin("cuFileReadAsync", scene, stream, &cells) == success);
    cells.file_offset = 4 * page;
    first.open();
    synchronize(stream);
    CHECK(cuda::read_device(scene.memory, page) ==
          std::vector(scene.bytes.begin() + 4 * page, scene.bytes.begin() + 5 * page));
    SAYS(success, "cuFileStreamRegister", stream, 15U);
    Cells fixed;
    Gate second(stream);
    CHECK(begin("cuFileReadAsync", scene, stream, &fixed) == success);
    fixed.file_offset = 4 * page;
    second.open();
    synchronize(stream);
    CHECK(cuda::read_device(scene.memory, page) == std::vector(scene.bytes.begin(), scene.bytes.begin() + page));
    SAYS(success, "cuFileStreamDeregister", stream);
    const int status = cuda::status_of_child([stream] { cf("cuFileStreamDeregister", stream); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void the_driver_stays_while_a_stream_works() {
    const Scene scene;
    const u64 stream = make_stream();
    Cells cells;
    Gate gate(stream);
    CHECK(begin("cuFileReadAsync", scene, stream, &cells) == success);
    SAYS(driver_closing, "cuFileDriverClose");
    gate.open();
    synchronize(stream);
    CHECK(cells.result == page);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void the_result_says_nothing_before_its_turn() {
    const Scene scene;
    const u64 stream = make_stream();
    Cells cells;
    Gate gate(stream);
    CHECK(begin("cuFileReadAsync", scene, stream, &cells) == success);
    CHECK(cells.result == 0);
    gate.open();
    synchronize(stream);
    CHECK(cells.result == page);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void without_a_current_context_the_result_is_an_error() {
    const Scene scene;
    const u64 stream = make_stream();
    Cells cells;
    std::thread([&] {
        SAYS(success, "cuFileStreamRegister", stream, 0U);
        CHECK(begin("cuFileReadAsync", scene, stream, &cells) == success);
        CHECK(cells.result == -ENOMEM);
        SAYS(success, "cuFileStreamDeregister", stream);
    }).join();
    synchronize(stream);
    CHECK(cells.result == -ENOMEM);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

void failures_are_the_result() {
    const Scene scene;
    const u64 stream = make_stream();
    Cells cells;
    plan("cufile.async_io call=1 status=5\ncufile.async_io call=2 status=5010");
    CHECK(begin("cuFileReadAsync", scene, stream, &cells) == success);
    synchronize(stream);
    CHECK(cells.result == -EIO);
    CHECK(begin("cuFileReadAsync", scene, stream, &cells) == success);
    synchronize(stream);
    CHECK(cells.result == -5010);
    SAYS(invalid_value, "cuFileStreamRegister", stream, 16U);
    SAYS(invalid_value, "cuFileStreamRegister", u64{0x1234567}, 0U);
    SAYS(invalid_value, "cuFileStreamDeregister", u64{0x1234567});
    CHECK(begin("cuFileReadAsync", scene, u64{0x1234567}, &cells) == invalid_value);
    CHECK(cuda::cu("cuStreamDestroy_v2", stream) == cuda::success);
}

} // namespace

int main() {
    transfers_keep_the_order_of_the_stream();
    what_is_not_fixed_is_read_in_its_turn();
    the_driver_stays_while_a_stream_works();
    the_result_says_nothing_before_its_turn();
    without_a_current_context_the_result_is_an_error();
    failures_are_the_result();
}
