// Tests of the code that all software twins share (native/twins/model): dma-bufs and their references, fault plans, the
// ledger of live handles, and the control service.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <thread>

#include "model/config.hpp"
#include "model/dmabuf.hpp"
#include "model/fault.hpp"
#include "model/fifo.hpp"
#include "model/hmac.hpp"
#include "model/ledger.hpp"
#include "model/sockets.hpp"
#include "tests/check.hpp"

using namespace gdrkit::twin;

namespace {

constexpr std::uint64_t mib = 1 << 20;
// Only these tests use this type of requests to the control service. Their handlers reply with the data of the request.
constexpr std::uint32_t echo_request = 77;

// Run `body` in a child process. Return the wait status of the child, and store its stderr in `stderr_text`.
int run_in_child(const std::function<void()>& body, std::string* stderr_text) {
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0);
    const pid_t child_pid = fork();
    CHECK(child_pid >= 0);
    if (child_pid == 0) {
        dup2(pipe_ends[1], STDERR_FILENO);
        close(pipe_ends[0]);
        body();
        _exit(0);
    }
    close(pipe_ends[1]);
    std::array<char, 4096> chunk{};
    for (ssize_t count = 0; (count = read(pipe_ends[0], chunk.data(), chunk.size())) > 0;) {
        stderr_text->append(chunk.data(), static_cast<std::size_t>(count));
    }
    close(pipe_ends[0]);
    int wait_status = 0;
    CHECK(waitpid(child_pid, &wait_status, 0) == child_pid);
    return wait_status;
}

void test_whole_export_cannot_be_mapped() {
    const Fd memory(make_device_memory(mib));
    CHECK(memory && !has_other_references(memory.get()));
    const Extent extent{memory.get(), 0, mib};
    Fd dmabuf(export_dmabuf({&extent, 1}));
    CHECK(dmabuf && has_other_references(memory.get()));
    CHECK(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, dmabuf.get(), 0) == MAP_FAILED && errno == EACCES);
    CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, dmabuf.get(), 0) == MAP_FAILED);
    CHECK(lseek(dmabuf.get(), 0, SEEK_END) == static_cast<off_t>(mib));
    ImportedDmabuf imported;
    CHECK(import_dmabuf(dmabuf.get(), &imported) == 0 && imported.length_bytes == mib);
    auto* mapped_bytes = static_cast<char*>(map_imported_dmabuf(imported));
    auto* memory_bytes = static_cast<char*>(mmap(nullptr, mib, PROT_READ, MAP_SHARED, memory.get(), 0));
    mapped_bytes[5] = 7;
    CHECK(memory_bytes[5] == 7);
    dmabuf.reset();
    imported.extents.clear();
    imported.attachment.reset();
    CHECK(has_other_references(memory.get())); // the mapping alone keeps the pages alive
    munmap(mapped_bytes, mib);
    CHECK(!has_other_references(memory.get()));
    munmap(memory_bytes, mib);
}

void test_parts_form_one_dmabuf() {
    const Fd first_memory(make_device_memory(mib)), second_memory(make_device_memory(8192));
    const Extent parts[] = {{first_memory.get(), 4096, 8192}, {second_memory.get(), 0, 8192}};
    Fd dmabuf(export_dmabuf(parts));
    CHECK(dmabuf && lseek(dmabuf.get(), 0, SEEK_END) == 16384);
    CHECK(has_other_references(first_memory.get()) && has_other_references(second_memory.get()));
    ImportedDmabuf imported;
    CHECK(import_dmabuf(dmabuf.get(), &imported) == 0 && imported.extents.size() == 2);
    auto* mapped_bytes = static_cast<char*>(map_imported_dmabuf(imported));
    CHECK(mapped_bytes != nullptr);
    mapped_bytes[1] = 9;
    mapped_bytes[8193] = 11;
    char byte = 0;
    CHECK(pread(first_memory.get(), &byte, 1, 4097) == 1 && byte == 9);
    CHECK(pread(second_memory.get(), &byte, 1, 1) == 1 && byte == 11);
    munmap(mapped_bytes, imported.length_bytes);
    imported.extents.clear();
    imported.attachment.reset();
    dmabuf.reset();
    CHECK(!has_other_references(first_memory.get()) && !has_other_references(second_memory.get()));
}

void test_export_lives_until_last_importer() {
    const Fd memory(make_device_memory(mib));
    const Extent extent{memory.get(), 0, mib};
    std::uint64_t first_id = 0, second_id = 0;
    Fd first_fd(export_tracked_dmabuf({&extent, 1}, &first_id)),
        second_fd(export_tracked_dmabuf({&extent, 1}, &second_id));
    CHECK(first_fd && second_fd && first_id != second_id && is_dmabuf_alive(first_id) && is_dmabuf_alive(second_id));
    ImportedDmabuf imported;
    CHECK(import_dmabuf(first_fd.get(), &imported) == 0 && imported.length_bytes == mib);
    first_fd.reset();
    second_fd.reset();
    CHECK(is_dmabuf_alive(first_id) && !is_dmabuf_alive(second_id));
    imported.extents.clear();
    CHECK(is_dmabuf_alive(first_id)); // the importer keeps the dma-buf alive, even if the memory is freed
    imported.attachment.reset();
    CHECK(!is_dmabuf_alive(first_id) && !is_dmabuf_alive(first_id) && !has_other_references(memory.get()));
}

void test_foreign_descriptors_are_refused() {
    ImportedDmabuf imported;
    // This memfd has the name of device memory, but the importer also requires seals.
    const Fd unsealed_memfd(memfd_create("gdrkit-gpu:0123456789abcdef", MFD_CLOEXEC));
    const Fd file(open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
    CHECK(import_dmabuf(unsealed_memfd.get(), &imported) == -EINVAL);
    CHECK(import_dmabuf(file.get(), &imported) == -EINVAL);
    CHECK(import_dmabuf(-1, &imported) == -EBADF && import_dmabuf(9999, &imported) == -EBADF);
}

void test_shareable_handle_is_not_a_dmabuf() {
    const Fd memory(make_device_memory(mib));
    const Extent part{memory.get(), 4096, 4096};
    const Fd handle(export_shareable_handle(memory.get())), dmabuf(export_dmabuf({&part, 1}));
    ImportedDmabuf imported;
    CHECK(import_dmabuf(handle.get(), &imported) == -EINVAL);
    CHECK(import_shareable_handle(dmabuf.get()) == -EINVAL && import_shareable_handle(9999) == -EBADF);
    const Fd imported_memory(import_shareable_handle(handle.get()));
    CHECK(imported_memory && lseek(imported_memory.get(), 0, SEEK_END) == static_cast<off_t>(mib));
}

// An importer asks the process that exported the dma-buf for its extents. After the end of that process, a new import
// fails, and an earlier import stays valid.
void test_import_of_parts_needs_live_owner() {
    int socket_ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, socket_ends) == 0);
    const pid_t owner_pid = fork();
    if (owner_pid == 0) {
        const Fd memory(make_device_memory(mib));
        const Extent part{memory.get(), 8192, 4096};
        const Fd dmabuf(export_dmabuf({&part, 1}));
        const int dmabuf_fd = dmabuf.get();
        char byte = 0;
        CHECK(pwrite(memory.get(), "x", 1, 8192) == 1 && send_fds(socket_ends[1], {&dmabuf_fd, 1}) &&
              recv_all(socket_ends[1], &byte, 1));
        _exit(0);
    }
    std::vector<Fd> fds;
    CHECK(recv_fds(socket_ends[0], 1, &fds));
    ImportedDmabuf imported, import_after_exit;
    CHECK(import_dmabuf(fds[0].get(), &imported) == 0 && imported.length_bytes == 4096);
    CHECK(send_all(socket_ends[0], "q", 1) && waitpid(owner_pid, nullptr, 0) == owner_pid);
    CHECK(import_dmabuf(fds[0].get(), &import_after_exit) == -ENODEV);
    char byte = 0;
    CHECK(pread(imported.extents[0].fd.get(), &byte, 1, 8192) == 1 && byte == 'x');
    close(socket_ends[0]);
    close(socket_ends[1]);
}

void test_plan_injects_failures() {
    const FaultPoint points[] = {{.name = "ibv_reg_mr", .kind = FaultKind::errno_value, .has_nic = true},
                                 {.name = "wc.send", .kind = FaultKind::status}};
    const std::string_view prefixes[] = {"ibv_", "wc."};
    CHECK(load_faults(points, prefixes).empty());
    // A rule names a fault point (a function, or a step such as wc.send), the numbers of the calls that fail, such as
    // the second and the third, and the result of these calls.
    // Rules for the calls of other twins (here cuMemAlloc_v2 and rdma_connect) have no effect in this twin.
    CHECK(replace_faults("gdrkit-faults 1\nibv_reg_mr call=2-3 errno=EFAULT # why\nwc.send call=* status=12\n"
                         "cuMemAlloc_v2 call=1 status=2\nrdma_connect call=1 errno=EIO\n")
              .empty());
    CHECK(!find_injected_fault("ibv_reg_mr") && find_injected_fault("ibv_reg_mr") == EFAULT &&
          find_injected_fault("ibv_reg_mr") == EFAULT && !find_injected_fault("ibv_reg_mr"));
    CHECK(find_injected_fault("wc.send") == 12);
    CHECK(format_calls_json() == R"({"ibv_reg_mr":4,"wc.send":1})");
}

void test_plan_delays_calls() {
    CHECK(replace_faults("gdrkit-faults 1\nwc.send call=1 delay_us=20000 status=12\n").empty());
    const auto begin = std::chrono::steady_clock::now();
    CHECK(find_injected_fault("wc.send") == 12);
    CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(20));
    CHECK(format_delayed_calls_json() == R"({"wc.send":1})");
    CHECK(replace_faults("gdrkit-faults 1\nwc.send call=* status=12\n").empty() && format_delayed_calls_json() == "{}");
}

// Create an empty file and return its path. A rule with `hold=PATH` delays calls while the file exists.
std::string make_hold_file() {
    std::string path = "/tmp/gdrkit-hold-XXXXXX";
    const int fd = mkstemp(path.data());
    CHECK(fd >= 0 && close(fd) == 0);
    return path;
}

void test_calls_that_are_delayed_at_the_same_time_are_counted() {
    const std::string hold_path = make_hold_file();
    CHECK(replace_faults("gdrkit-faults 1\nibv_reg_mr call=1-2 hold=" + hold_path + "\n").empty());
    const auto make_call = [] { CHECK(!find_injected_fault("ibv_reg_mr")); };
    std::thread first_thread(make_call), second_thread(make_call);
    while (format_delayed_calls_json() != R"({"ibv_reg_mr":2})") {
        std::this_thread::yield();
    }
    CHECK(unlink(hold_path.c_str()) == 0);
    first_thread.join();
    second_thread.join();
    make_call();
    CHECK(format_delayed_calls_json() == R"({"ibv_reg_mr":2})");
}

void test_plan_holds_calls_while_a_file_exists() {
    const std::string hold_path = make_hold_file();
    CHECK(replace_faults("gdrkit-faults 1\nibv_reg_mr call=1 errno=EFAULT hold=" + hold_path + "\n").empty());
    std::atomic<bool> has_ended{false};
    std::thread held_thread([&] {
        CHECK(find_injected_fault("ibv_reg_mr") == EFAULT);
        has_ended = true;
    });
    while (format_delayed_calls_json() != R"({"ibv_reg_mr":1})") {
        std::this_thread::yield();
    }
    CHECK(!find_injected_fault("ibv_reg_mr") && !has_ended); // the rule does not hold the second call
    CHECK(unlink(hold_path.c_str()) == 0);
    held_thread.join();
    CHECK(has_ended && replace_faults("gdrkit-faults 1\nibv_reg_mr call=1 hold=here\n").starts_with("line 2: "));
}

void test_rule_applies_to_the_calls_of_its_nic() {
    const std::string_view nics[] = {"twin0", "twin2"};
    CHECK(replace_faults("gdrkit-faults 1\nibv_reg_mr call=* errno=EFAULT nic=twin2\n").empty());
    CHECK(find_injected_fault("ibv_reg_mr", nics) == EFAULT && !find_injected_fault("ibv_reg_mr", std::span(nics, 1)) &&
          !find_injected_fault("ibv_reg_mr"));
    // wc.send is declared without has_nic, and the other rule has no result.
    CHECK(replace_faults("gdrkit-faults 1\nwc.send call=* status=12 nic=twin2\n").starts_with("line 2: "));
    CHECK(replace_faults("gdrkit-faults 1\nibv_reg_mr call=* nic=twin2\n").starts_with("line 2: "));
    CHECK(replace_faults("gdrkit-faults 1\nwc.send call=* status=12\n").empty());
}

// A malformed plan does not replace the current plan. The previous test left a plan that makes wc.send fail with the
// status 12.
void test_malformed_plan_is_rejected() {
    for (const char* malformed_plan :
         {"", "gdrkit-faults 2\n", "ibv_reg_mr call=1 errno=1\n", "gdrkit-faults 1\nibv_reg_mr call=0 errno=1\n",
          "gdrkit-faults 1\nibv_reg_mr call=3-2 errno=1\n", "gdrkit-faults 1\nibv_reg_mr call=1\n",
          "gdrkit-faults 1\nibv_reg_mr call=1 errno=EWHAT\n", "gdrkit-faults 1\nibv_reg_mr call=1 status=1\n",
          "gdrkit-faults 1\nibv_unknown call=1 errno=1\n", "gdrkit-faults 1\nrubbish\n",
          "gdrkit-faults 1\nwc.send call=1 delay_us=0\n", "gdrkit-faults 1\nwc.send call=1 delay_us=10000001\n",
          "gdrkit-faults 1\nwc.send call=1 status=0\n", "gdrkit-faults 1\nwc.send call=1 call=2 status=1\n",
          "gdrkit-faults 1\nwc.send call=99999999999999999999 status=1\n"}) {
        const std::string error = replace_faults(malformed_plan);
        CHECK(error.starts_with("line "));
    }
    CHECK(find_injected_fault("wc.send") == 12);
    CHECK(replace_faults("gdrkit-faults 1\n").empty() && !find_injected_fault("wc.send"));
}

void test_double_release_aborts_with_stacks() {
    std::string stderr_text;
    const int status = run_in_child(
        [] {
            // The second removal must abort the process. An exit code of 3 means that a removal only failed.
            record_open_handle("thing", 5);
            if (!record_closed_handle("thing", 5) || !record_closed_handle("thing", 5)) {
                _exit(3);
            }
        },
        &stderr_text);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(stderr_text.find("double release of thing 0x5") != std::string::npos);
    CHECK(stderr_text.find("created at") != std::string::npos &&
          stderr_text.find("released first at") != std::string::npos &&
          stderr_text.find("released again at") != std::string::npos);
}

void test_release_history_is_bounded() {
    std::string stderr_text;
    const int status = run_in_child(
        [] {
            // The handle 5 is issued and released twice, so it has two entries in the history of releases. The releases
            // of the second loop remove the older entry from the history, but the newer entry must stay.
            for (std::uint64_t handle : {5, 5}) {
                record_open_handle("thing", handle);
                if (!record_closed_handle("thing", handle)) {
                    _exit(3);
                }
            }
            for (std::uint64_t handle = 100; handle < 100 + max_remembered_releases - 1; ++handle) {
                record_open_handle("thing", handle);
                if (!record_closed_handle("thing", handle)) {
                    _exit(3);
                }
            }
            // The third release of the handle 5 must abort the process, so it does not exit.
            _exit(record_closed_handle("thing", 5) ? 4 : 5);
        },
        &stderr_text);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void test_ledger_counts_live_handles() {
    CHECK(ledger_json() == "{}");
    record_open_handle("a", 1);
    record_open_handle("a", 2);
    record_open_handle("b", 1);
    CHECK(ledger_json() == R"({"a":2,"b":1})" && ledger_holds("b", 1) && !ledger_holds("b", 2));
    CHECK(!record_closed_handle("b", 7));
    CHECK(record_closed_handle("b", 1) && record_closed_handle("a", 1) && record_closed_handle("a", 2));
    record_open_handle("a", 1); // the value is issued again, so the next release is not a double release
    CHECK(record_closed_handle("a", 1) && ledger_json() == "{}");
}

// A peer that sends other bytes than a request header does not disturb the requests of other peers.
void test_control_service_with_untrusted_peers() {
    register_handler(echo_request,
                     [](auto request, auto* reply, auto*) { reply->assign(request.begin(), request.end()); });
    const std::byte request_data[] = {std::byte{1}, std::byte{2}};
    std::vector<std::byte> reply;
    std::vector<Fd> fds;
    char socket_name[40];
    std::snprintf(socket_name, sizeof socket_name, "control.%016llx",
                  static_cast<unsigned long long>(read_control_service_id()));
    const Fd untrusted_peer(connect_to(socket_name));
    CHECK(untrusted_peer && send_all(untrusted_peer.get(), "this is not a header text", 25));
    CHECK(send_control_request(read_control_service_id(), echo_request, request_data, &reply, &fds) &&
          reply.size() == 2 && reply[1] == request_data[1]);
    CHECK(!send_control_request(read_control_service_id(), echo_request + 1, request_data, &reply, &fds));
    CHECK(!send_control_request(read_control_service_id() + 1, echo_request, request_data, &reply, &fds));
}

// A hostile process reports extents for its dma-buf, whose first length already exceeds the dma-buf. The sum of the
// lengths overflows to the size of the dma-buf.
void test_overflowing_extents_are_refused() {
    register_handler(dmabuf_extents_request, [](auto, auto* reply, auto* fds) {
        constexpr std::uint64_t quarter = std::uint64_t{1} << 62; // of 2^64
        for (const std::uint64_t length : {std::uint64_t{16384}, quarter, quarter, quarter, quarter - 8192}) {
            const std::uint64_t offset_and_length[] = {0, length};
            const auto* bytes = reinterpret_cast<const std::byte*>(offset_and_length);
            reply->insert(reply->end(), bytes, bytes + sizeof offset_and_length);
            fds->emplace_back(make_device_memory(length));
        }
    });
    char memfd_name[64];
    std::snprintf(memfd_name, sizeof memfd_name, "gdrkit-dmabuf:%016llx:%016llx",
                  static_cast<unsigned long long>(read_control_service_id()), 1ULL);
    const Fd dmabuf(memfd_create(memfd_name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(ftruncate(dmabuf.get(), 8192) == 0);
    CHECK(fcntl(dmabuf.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    ImportedDmabuf imported;
    CHECK(import_dmabuf(dmabuf.get(), &imported) == -EINVAL);
}

// The thread of the control service must block all signals. Otherwise, the kernel could deliver a signal to that
// thread that the program has blocked in its other threads in order to receive it by sigwaitinfo.
void test_control_service_blocks_signals() {
    read_control_service_id();
    sigset_t blocked_signals, previous_mask;
    sigemptyset(&blocked_signals);
    sigaddset(&blocked_signals, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &blocked_signals, &previous_mask) == 0 && kill(getpid(), SIGUSR1) == 0);
    CHECK(sigwaitinfo(&blocked_signals, nullptr) == SIGUSR1 &&
          pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr) == 0);
}

// The process with the service is stopped (SIGSTOP), so it does not reply. The request must end by its timeout.
void test_stopped_service_times_out() {
    int socket_ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, socket_ends) == 0);
    const pid_t owner_pid = fork();
    if (owner_pid == 0) {
        register_handler(echo_request,
                         [](auto request, auto* reply, auto*) { reply->assign(request.begin(), request.end()); });
        const std::uint64_t own_service_id = read_control_service_id();
        char byte = 0;
        CHECK(send_all(socket_ends[1], &own_service_id, sizeof own_service_id));
        _exit(recv_all(socket_ends[1], &byte, 1) ? 0 : 1);
    }
    std::uint64_t service_id = 0;
    CHECK(recv_all(socket_ends[0], &service_id, sizeof service_id));
    int status = 0;
    CHECK(kill(owner_pid, SIGSTOP) == 0 && waitpid(owner_pid, &status, WUNTRACED) == owner_pid && WIFSTOPPED(status));
    const std::byte request_data[] = {std::byte{1}};
    std::vector<std::byte> reply;
    std::vector<Fd> fds;
    CHECK(!send_control_request(service_id, echo_request, request_data, &reply, &fds));
    CHECK(kill(owner_pid, SIGKILL) == 0 && waitpid(owner_pid, nullptr, 0) == owner_pid);
    close(socket_ends[0]);
    close(socket_ends[1]);
}

void test_malformed_variable_is_an_error() {
    std::string stderr_text;
    const int status = run_in_child(
        [] {
            setenv("GDRKIT_TWINS_NICS", "many", 1);
            _exit(config().error == "GDRKIT_TWINS_NICS=many: expected a number from 0 to 16" ? 4 : 5);
        },
        &stderr_text);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 4);
    CHECK(stderr_text.find("GDRKIT_TWINS_NICS=many") != std::string::npos);
}

void test_fifo_reuses_memory() {
    Fifo<int> fifo;
    std::deque<int> reference; // must always have the same numbers as `fifo`
    std::mt19937 generator(5);
    for (int number = 0; number < 20000; ++number) {
        // The queue mostly grows for 1000 rounds, then mostly shrinks for 1000 rounds, and so on.
        const bool must_push = generator() % 100 < (number / 1000 % 2 == 0 ? 70U : 30U);
        if (must_push || reference.empty()) {
            const bool uses_back = generator() % 4 != 0;
            uses_back ? fifo.push_back(number) : fifo.push_front(number);
            uses_back ? reference.push_back(number) : reference.push_front(number);
        } else if (generator() % 4 != 0) {
            fifo.pop_front();
            reference.pop_front();
        } else {
            fifo.pop_back();
            reference.pop_back();
        }
        CHECK(fifo.size() == reference.size() && fifo.empty() == reference.empty());
        for (std::size_t index = 0; index < reference.size(); ++index) {
            CHECK(fifo[index] == reference[index]);
        }
        CHECK(reference.empty() || (fifo.front() == reference.front() && fifo.back() == reference.back()));
    }
    fifo.clear();
    CHECK(fifo.empty() && fifo.push_back(7) == 7 && fifo.size() == 1);
}

} // namespace

// main() sets GDRKIT_TWINS_LATE_SHARE to 10, so about 10 % of the delays are not 0. The test allows 5 % to 20 %.
void test_share_of_delays() {
    constexpr unsigned draw_count = 20'000;
    unsigned delay_count = 0;
    for (unsigned draw = 0; draw < draw_count; ++draw) {
        const std::uint64_t delay_us = random_delay_us();
        CHECK(delay_us <= config().max_delay_us);
        delay_count += delay_us > 0 ? 1 : 0;
    }
    CHECK(config().delayed_percent == 10 && delay_count > draw_count / 20 && delay_count < draw_count / 5);
}

void test_hmac_has_the_digests_of_rfc_4231() {
    const auto compute_hex_hmac = [](std::string_view key, std::initializer_list<std::string_view> parts) {
        std::string hex;
        for (const std::uint8_t byte : hmac_sha256(key, parts)) {
            char digits[3];
            std::snprintf(digits, sizeof digits, "%02x", byte);
            hex += digits;
        }
        return hex;
    };
    CHECK(compute_hex_hmac("Jefe", {"what do ya want ", "for nothing?"}) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    // HMAC first hashes a key that is longer than a block (64 bytes).
    CHECK(compute_hex_hmac(std::string(131, '\xaa'), {"Test Using Larger Than Block-Size Key - Hash Key First"}) ==
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    CHECK(is_equal_digest(hmac_sha256("a", {"b"}), hmac_sha256("a", {"b"})));
    CHECK(!is_equal_digest(hmac_sha256("a", {"b"}), hmac_sha256("a", {"c"})));
}

int main() {
    CHECK(setenv("GDRKIT_TWINS_LATE_SHARE", "10", 1) == 0);
    // The first tests fork. Run them before the other tests start threads and read the configuration in this process.
    test_malformed_variable_is_an_error();
    test_double_release_aborts_with_stacks();
    test_release_history_is_bounded();
    test_stopped_service_times_out();
    test_import_of_parts_needs_live_owner();
    test_whole_export_cannot_be_mapped();
    test_parts_form_one_dmabuf();
    test_export_lives_until_last_importer();
    test_foreign_descriptors_are_refused();
    test_shareable_handle_is_not_a_dmabuf();
    // The first test of fault plans declares the fault points for the other tests of plans.
    test_plan_injects_failures();
    test_plan_holds_calls_while_a_file_exists();
    test_plan_delays_calls();
    test_calls_that_are_delayed_at_the_same_time_are_counted();
    test_rule_applies_to_the_calls_of_its_nic();
    test_malformed_plan_is_rejected();
    test_ledger_counts_live_handles();
    test_control_service_with_untrusted_peers();
    test_control_service_blocks_signals();
    test_overflowing_extents_are_refused();
    test_fifo_reuses_memory();
    test_share_of_delays();
    test_hmac_has_the_digests_of_rfc_4231();
    return 0;
}
