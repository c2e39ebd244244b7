// The shared model: dma-bufs and who holds them, fault plans, the ledger, the control service.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
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
#include "model/ledger.hpp"
#include "model/rendezvous.hpp"
#include "tests/check.hpp"

using namespace gdrkit::twin;

namespace {

constexpr std::uint64_t mib = 1 << 20;

// Runs `body` in a child; gives its wait status and what it wrote to stderr.
int in_child(const std::function<void()>& body, std::string* text) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        body();
        _exit(0);
    }
    close(ends[1]);
    std::array<char, 4096> room{};
    for (ssize_t got = 0; (got = read(ends[0], room.data(), room.size())) > 0;) {
        text->append(room.data(), static_cast<std::size_t>(got));
    }
    close(ends[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

void a_whole_allocation_is_exported_and_can_not_be_mapped() {
    const Fd memory(make_device_memory(mib));
    CHECK(memory && !held_elsewhere(memory.get()));
    const Extent whole{memory.get(), 0, mib};
    Fd dmabuf(export_dmabuf({&whole, 1}));
    CHECK(dmabuf && held_elsewhere(memory.get()));
    CHECK(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, dmabuf.get(), 0) == MAP_FAILED && errno == EACCES);
    CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, dmabuf.get(), 0) == MAP_FAILED);
    CHECK(lseek(dmabuf.get(), 0, SEEK_END) == static_cast<off_t>(mib));
    Imported imported;
    CHECK(import_dmabuf(dmabuf.get(), &imported) == 0 && imported.length_bytes == mib);
    auto* mapped = static_cast<char*>(map_imported(imported));
    auto* own = static_cast<char*>(mmap(nullptr, mib, PROT_READ, MAP_SHARED, memory.get(), 0));
    mapped[5] = 7;
    CHECK(own[5] == 7);
    dmabuf.reset();
    imported.pieces.clear();
    imported.attachment.reset();
    CHECK(held_elsewhere(memory.get())); // the mapping alone keeps the pages
    munmap(mapped, mib);
    CHECK(!held_elsewhere(memory.get()));
    munmap(own, mib);
}

void parts_and_several_chunks_are_one_dmabuf() {
    const Fd first(make_device_memory(mib)), second(make_device_memory(8192));
    const Extent parts[] = {{first.get(), 4096, 8192}, {second.get(), 0, 8192}};
    Fd dmabuf(export_dmabuf(parts));
    CHECK(dmabuf && lseek(dmabuf.get(), 0, SEEK_END) == 16384);
    CHECK(held_elsewhere(first.get()) && held_elsewhere(second.get()));
    Imported imported;
    CHECK(import_dmabuf(dmabuf.get(), &imported) == 0 && imported.pieces.size() == 2);
    auto* mapped = static_cast<char*>(map_imported(imported));
    CHECK(mapped != nullptr);
    mapped[1] = 9;
    mapped[8193] = 11;
    char seen = 0;
    CHECK(pread(first.get(), &seen, 1, 4097) == 1 && seen == 9);
    CHECK(pread(second.get(), &seen, 1, 1) == 1 && seen == 11);
    munmap(mapped, imported.length_bytes);
    imported.pieces.clear();
    imported.attachment.reset();
    dmabuf.reset();
    CHECK(!held_elsewhere(first.get()) && !held_elsewhere(second.get()));
}

void an_export_lives_until_its_last_importer() {
    const Fd memory(make_device_memory(mib));
    const Extent whole{memory.get(), 0, mib};
    std::uint64_t first = 0, second = 0;
    Fd one(export_tracked_dmabuf({&whole, 1}, &first)), other(export_tracked_dmabuf({&whole, 1}, &second));
    CHECK(one && other && first != second && dmabuf_alive(first) && dmabuf_alive(second));
    Imported imported;
    CHECK(import_dmabuf(one.get(), &imported) == 0 && imported.length_bytes == mib);
    one.reset();
    other.reset();
    CHECK(dmabuf_alive(first) && !dmabuf_alive(second));
    imported.pieces.clear();
    CHECK(dmabuf_alive(first)); // who imported it has it, whatever is left of the memory
    imported.attachment.reset();
    CHECK(!dmabuf_alive(first) && !dmabuf_alive(first) && !held_elsewhere(memory.get()));
}

void what_no_exporter_issued_is_refused() {
    Imported imported;
    const Fd plain(memfd_create("gdrkit-gpu:0123456789abcdef", MFD_CLOEXEC)); // the name alone is not enough
    const Fd file(open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
    CHECK(import_dmabuf(plain.get(), &imported) == -EINVAL);
    CHECK(import_dmabuf(file.get(), &imported) == -EINVAL);
    CHECK(import_dmabuf(-1, &imported) == -EBADF && import_dmabuf(9999, &imported) == -EBADF);
}

void a_shareable_handle_is_not_a_dmabuf() {
    const Fd memory(make_device_memory(mib));
    const Extent part{memory.get(), 4096, 4096};
    const Fd handle(export_shareable(memory.get())), dmabuf(export_dmabuf({&part, 1}));
    Imported imported;
    CHECK(import_dmabuf(handle.get(), &imported) == -EINVAL);
    CHECK(import_shareable(dmabuf.get()) == -EINVAL && import_shareable(9999) == -EBADF);
    const Fd again(import_shareable(handle.get()));
    CHECK(again && lseek(again.get(), 0, SEEK_END) == static_cast<off_t>(mib));
}

void parts_can_be_imported_by_another_process_only_while_the_owner_lives() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const pid_t owner = fork();
    if (owner == 0) {
        const Fd memory(make_device_memory(mib));
        const Extent part{memory.get(), 8192, 4096};
        const Fd dmabuf(export_dmabuf({&part, 1}));
        const int given = dmabuf.get();
        char word = 0;
        CHECK(pwrite(memory.get(), "x", 1, 8192) == 1 && send_fds(ends[1], {&given, 1}) && recv_all(ends[1], &word, 1));
        _exit(0);
    }
    std::vector<Fd> fds;
    CHECK(recv_fds(ends[0], 1, &fds));
    Imported imported, late;
    CHECK(import_dmabuf(fds[0].get(), &imported) == 0 && imported.length_bytes == 4096);
    CHECK(send_all(ends[0], "q", 1) && waitpid(owner, nullptr, 0) == owner);
    CHECK(import_dmabuf(fds[0].get(), &late) == -ENODEV);
    char seen = 0;
    CHECK(pread(imported.pieces[0].fd.get(), &seen, 1, 8192) == 1 && seen == 'x');
    close(ends[0]);
    close(ends[1]);
}

void a_plan_fails_the_calls_that_it_names() {
    const FaultPoint points[] = {{"ibv_reg_mr", FaultKind::errno_value}, {"wc.send", FaultKind::status}};
    const std::string_view prefixes[] = {"ibv_", "wc."};
    CHECK(load_faults(points, prefixes).empty());
    CHECK(replace_faults("gdrkit-faults 1\nibv_reg_mr call=2-3 errno=EFAULT # why\nwc.send call=* status=12\n"
                         "cuMemAlloc_v2 call=1 status=2\n")
              .empty());
    CHECK(!hit("ibv_reg_mr") && hit("ibv_reg_mr") == EFAULT && hit("ibv_reg_mr") == EFAULT && !hit("ibv_reg_mr"));
    CHECK(hit("wc.send") == 12);
    CHECK(calls_json() == R"({"ibv_reg_mr":4,"wc.send":1})");
}

void a_plan_holds_up_the_calls_that_it_names() {
    CHECK(replace_faults("gdrkit-faults 1\nibv_reg_mr call=1-2 delay_us=200000\nwc.send call=1 delay_us=1 status=12\n")
              .empty());
    std::thread other([] { CHECK(!hit("ibv_reg_mr")); });
    CHECK(!hit("ibv_reg_mr") && hit("wc.send") == 12);
    other.join();
    CHECK(held_json() == R"({"ibv_reg_mr":2,"wc.send":1})");
    CHECK(replace_faults("gdrkit-faults 1\nwc.send call=* status=12\n").empty() && held_json() == "{}");
}

void a_malformed_plan_is_named_by_line_and_changes_nothing() {
    for (const char* bad :
         {"", "gdrkit-faults 2\n", "ibv_reg_mr call=1 errno=1\n", "gdrkit-faults 1\nibv_reg_mr call=0 errno=1\n",
          "gdrkit-faults 1\nibv_reg_mr call=3-2 errno=1\n", "gdrkit-faults 1\nibv_reg_mr call=1\n",
          "gdrkit-faults 1\nibv_reg_mr call=1 errno=EWHAT\n", "gdrkit-faults 1\nibv_reg_mr call=1 status=1\n",
          "gdrkit-faults 1\nibv_unknown call=1 errno=1\n", "gdrkit-faults 1\nrubbish\n",
          "gdrkit-faults 1\nwc.send call=1 delay_us=0\n", "gdrkit-faults 1\nwc.send call=1 delay_us=10000001\n",
          "gdrkit-faults 1\nwc.send call=1 status=0\n", "gdrkit-faults 1\nwc.send call=1 call=2 status=1\n",
          "gdrkit-faults 1\nwc.send call=99999999999999999999 status=1\n"}) {
        const std::string error = replace_faults(bad);
        CHECK(error.starts_with("line "));
    }
    CHECK(hit("wc.send") == 12);
    CHECK(replace_faults("gdrkit-faults 1\n").empty() && !hit("wc.send"));
}

void a_second_release_aborts_with_the_stacks() {
    std::string text;
    const int status = in_child(
        [] {
            ledger_add("thing", 5);
            if (!ledger_remove("thing", 5) || !ledger_remove("thing", 5)) {
                _exit(3);
            }
        },
        &text);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(text.find("double release of thing 0x5") != std::string::npos);
    CHECK(text.find("created at") != std::string::npos && text.find("released first at") != std::string::npos &&
          text.find("released again at") != std::string::npos);
}

void a_release_is_remembered_as_long_as_any_other() {
    std::string text;
    const int status = in_child(
        [] {
            // Given out twice, so that its name is noted twice; the older note must not end the memory of the newer.
            for (std::uint64_t handle : {5, 5}) {
                ledger_add("thing", handle);
                if (!ledger_remove("thing", handle)) {
                    _exit(3);
                }
            }
            for (std::uint64_t handle = 100; handle < 100 + releases_remembered - 1; ++handle) {
                ledger_add("thing", handle);
                if (!ledger_remove("thing", handle)) {
                    _exit(3);
                }
            }
            _exit(ledger_remove("thing", 5) ? 4 : 5);
        },
        &text);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void the_ledger_counts_what_lives() {
    CHECK(ledger_json() == "{}");
    ledger_add("a", 1);
    ledger_add("a", 2);
    ledger_add("b", 1);
    CHECK(ledger_json() == R"({"a":2,"b":1})" && ledger_holds("b", 1) && !ledger_holds("b", 2));
    CHECK(!ledger_remove("b", 7));
    CHECK(ledger_remove("b", 1) && ledger_remove("a", 1) && ledger_remove("a", 2));
    ledger_add("a", 1); // given out again: its earlier release is forgotten
    CHECK(ledger_remove("a", 1) && ledger_json() == "{}");
}

void the_control_service_answers_and_survives_strangers() {
    serve(77, [](auto request, auto* reply, auto*) { reply->assign(request.begin(), request.end()); });
    const std::byte word[] = {std::byte{1}, std::byte{2}};
    std::vector<std::byte> reply;
    std::vector<Fd> fds;
    char name[40];
    std::snprintf(name, sizeof name, "control.%016llx", static_cast<unsigned long long>(control_name()));
    const Fd stranger(connect_to(name));
    CHECK(stranger && send_all(stranger.get(), "rubbish that is no header", 25));
    CHECK(ask(control_name(), 77, word, &reply, &fds) && reply.size() == 2 && reply[1] == word[1]);
    CHECK(!ask(control_name(), 78, word, &reply, &fds));
    CHECK(!ask(control_name() + 1, 77, word, &reply, &fds));
}

// An owner that lies about the lengths: their sum overflows to the size of the dma-buf, but the first alone is more.
void extents_that_do_not_fit_are_refused() {
    serve(ask_dmabuf_extents, [](auto, auto* reply, auto* fds) {
        constexpr std::uint64_t quarter = std::uint64_t{1} << 62;
        for (const std::uint64_t length : {std::uint64_t{16384}, quarter, quarter, quarter, quarter - 8192}) {
            const std::uint64_t wire[] = {0, length};
            const auto* bytes = reinterpret_cast<const std::byte*>(wire);
            reply->insert(reply->end(), bytes, bytes + sizeof wire);
            fds->emplace_back(make_device_memory(length));
        }
    });
    char name[64];
    std::snprintf(name, sizeof name, "gdrkit-dmabuf:%016llx:%016llx", static_cast<unsigned long long>(control_name()),
                  1ULL);
    const Fd dmabuf(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(ftruncate(dmabuf.get(), 8192) == 0);
    CHECK(fcntl(dmabuf.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    Imported imported;
    CHECK(import_dmabuf(dmabuf.get(), &imported) == -EINVAL);
}

// The program's signals are for the program's own threads: a blocked one stays pending while the service runs.
void the_control_service_takes_no_signal() {
    control_name();
    sigset_t one, before;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &one, &before) == 0 && kill(getpid(), SIGUSR1) == 0);
    CHECK(sigwaitinfo(&one, nullptr) == SIGUSR1 && pthread_sigmask(SIG_SETMASK, &before, nullptr) == 0);
}

void a_service_that_is_stopped_is_given_up() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const pid_t owner = fork();
    if (owner == 0) {
        serve(77, [](auto request, auto* reply, auto*) { reply->assign(request.begin(), request.end()); });
        const std::uint64_t own = control_name();
        char word = 0;
        CHECK(send_all(ends[1], &own, sizeof own));
        _exit(recv_all(ends[1], &word, 1) ? 0 : 1);
    }
    std::uint64_t name = 0;
    CHECK(recv_all(ends[0], &name, sizeof name));
    int status = 0;
    CHECK(kill(owner, SIGSTOP) == 0 && waitpid(owner, &status, WUNTRACED) == owner && WIFSTOPPED(status));
    const std::byte word[] = {std::byte{1}};
    std::vector<std::byte> reply;
    std::vector<Fd> fds;
    CHECK(!ask(name, 77, word, &reply, &fds));
    CHECK(kill(owner, SIGKILL) == 0 && waitpid(owner, nullptr, 0) == owner);
    close(ends[0]);
    close(ends[1]);
}

void a_malformed_variable_is_an_error_not_a_guess() {
    std::string text;
    const int status = in_child(
        [] {
            setenv("GDRKIT_TWINS_NICS", "many", 1);
            _exit(config().error == "GDRKIT_TWINS_NICS=many: expected a number from 0 to 16" ? 4 : 5);
        },
        &text);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 4);
    CHECK(text.find("GDRKIT_TWINS_NICS=many") != std::string::npos);
}

void a_fifo_is_a_deque_that_keeps_its_memory() {
    Fifo<int> fifo;
    std::deque<int> same;
    std::mt19937 chance(5);
    for (int number = 0; number < 20000; ++number) {
        // Long phases in which it grows, and in which it empties.
        const bool grows = chance() % 100 < (number / 1000 % 2 == 0 ? 70U : 30U);
        if (grows || same.empty()) {
            const bool at_end = chance() % 4 != 0;
            at_end ? fifo.push_back(number) : fifo.push_front(number);
            at_end ? same.push_back(number) : same.push_front(number);
        } else if (chance() % 4 != 0) {
            fifo.pop_front();
            same.pop_front();
        } else {
            fifo.pop_back();
            same.pop_back();
        }
        CHECK(fifo.size() == same.size() && fifo.empty() == same.empty());
        for (std::size_t index = 0; index < same.size(); ++index) {
            CHECK(fifo[index] == same[index]);
        }
        CHECK(same.empty() || (fifo.front() == same.front() && fifo.back() == same.back()));
    }
    fifo.clear();
    CHECK(fifo.empty() && fifo.push_back(7) == 7 && fifo.size() == 1);
}

} // namespace

int main() {
    // Children first: they must begin without the threads and the configuration of this process.
    a_malformed_variable_is_an_error_not_a_guess();
    a_second_release_aborts_with_the_stacks();
    a_release_is_remembered_as_long_as_any_other();
    a_service_that_is_stopped_is_given_up();
    parts_can_be_imported_by_another_process_only_while_the_owner_lives();
    a_whole_allocation_is_exported_and_can_not_be_mapped();
    parts_and_several_chunks_are_one_dmabuf();
    an_export_lives_until_its_last_importer();
    what_no_exporter_issued_is_refused();
    a_shareable_handle_is_not_a_dmabuf();
    a_plan_fails_the_calls_that_it_names();
    a_plan_holds_up_the_calls_that_it_names();
    a_malformed_plan_is_named_by_line_and_changes_nothing();
    the_ledger_counts_what_lives();
    the_control_service_answers_and_survives_strangers();
    the_control_service_takes_no_signal();
    extents_that_do_not_fit_are_refused();
    a_fifo_is_a_deque_that_keeps_its_memory();
    return 0;
}
