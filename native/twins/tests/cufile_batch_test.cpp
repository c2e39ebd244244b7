// Batches: many at once, from several threads, stalled, canceled, and given back while bytes move.
#include <atomic>
#include <map>
#include <thread>

#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::size_t page = 4096;

IoParameters entry_of(const Scene& scene, std::size_t index, Opcode opcode = opcode_read) {
    IoParameters made{};
    made.mode = mode_batch;
    made.batch = {pointer(scene.memory), static_cast<off_t>(index * page), static_cast<off_t>(index * page), page};
    made.file = scene.file;
    made.opcode = opcode;
    made.cookie = pointer(index + 1);
    return made;
}

BatchHandle set_up(unsigned capacity) {
    BatchHandle batch = nullptr;
    SAYS(success, "cuFileBatchIOSetUp", &batch, capacity);
    return batch;
}

int submit(BatchHandle batch, std::vector<IoParameters> entries) {
    return cf("cuFileBatchIOSubmit", batch, static_cast<unsigned>(entries.size()), entries.data(), 0U);
}

// How the transfers ended, by cookie; waits for `count` of them.
std::map<u64, IoEvent> ended(BatchHandle batch, unsigned count) {
    std::map<u64, IoEvent> found;
    while (found.size() < count) {
        IoEvent events[8];
        unsigned given = 8;
        SAYS(success, "cuFileBatchIOGetStatus", batch, 1U, &given, static_cast<IoEvent*>(events),
             static_cast<timespec*>(nullptr));
        CHECK(given >= 1);
        for (unsigned index = 0; index < given; ++index) {
            CHECK(found.emplace(reinterpret_cast<u64>(events[index].cookie), events[index]).second);
        }
    }
    return found;
}

void a_batch_moves_everything_once() {
    const Scene scene;
    const BatchHandle batch = set_up(32);
    std::vector<IoParameters> entries;
    for (std::size_t index = 0; index < 32; ++index) {
        entries.push_back(entry_of(scene, index));
    }
    CHECK(submit(batch, entries) == success);
    // Full until somebody has asked.
    CHECK(submit(batch, {entry_of(scene, 0)}) == batch_full);
    for (const auto& [cookie, event] : ended(batch, 32)) {
        CHECK(event.status == io_complete && event.result == page && cookie >= 1 && cookie <= 32);
    }
    CHECK(cuda::read_device(scene.memory, 32 * page) ==
          std::vector(scene.bytes.begin(), scene.bytes.begin() + 32 * page));
    CHECK(submit(batch, {entry_of(scene, 0)}) == success);
    ended(batch, 1);
    call<void>("cuFileBatchIODestroy", batch);
}

void what_cannot_be_right_is_refused() {
    const Scene scene;
    const BatchHandle batch = set_up(4);
    IoParameters entry = entry_of(scene, 0);
    CHECK(submit(batch, {}) == invalid_value);
    entry.mode = 7;
    CHECK(submit(batch, {entry}) == invalid_value);
    entry = entry_of(scene, 0);
    entry.file = pointer(0x10);
    CHECK(submit(batch, {entry}) == handle_not_registered);
    CHECK(submit(pointer(0x10), {entry_of(scene, 0)}) == invalid_value);
    unsigned given = 1;
    IoEvent event{};
    timespec wrong{0, 1'000'000'000};
    SAYS(invalid_value, "cuFileBatchIOGetStatus", batch, 1U, &given, &event, &wrong);
    SAYS(invalid_value, "cuFileBatchIOGetStatus", batch, 2U, &given, &event, static_cast<timespec*>(nullptr));
    call<void>("cuFileBatchIODestroy", batch);
    const int status = cuda::status_of_child([] { call<void>("cuFileBatchIODestroy", pointer(0x10)); });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void one_that_fails_does_not_end_the_others() {
    const Scene scene;
    plan("cufile.batch_io call=2 status=5");
    const BatchHandle batch = set_up(4);
    CHECK(submit(batch, {entry_of(scene, 0), entry_of(scene, 1), entry_of(scene, 2)}) == success);
    auto events = ended(batch, 3);
    CHECK(events[1].status == io_complete && events[3].status == io_complete);
    CHECK(events[2].status == io_failed && static_cast<ssize_t>(events[2].result) == -EIO);
    call<void>("cuFileBatchIODestroy", batch);
}

void a_stall_is_seen_and_can_be_canceled() {
    const Scene scene;
    plan("cufile.batch_io call=2 delay_us=10000000");
    const BatchHandle batch = set_up(4);
    CHECK(submit(batch, {entry_of(scene, 0), entry_of(scene, 1), entry_of(scene, 2)}) == success);
    CHECK(ended(batch, 1)[1].status == io_complete);
    unsigned given = 4;
    IoEvent events[4];
    timespec moment{0, 1'000'000};
    SAYS(success, "cuFileBatchIOGetStatus", batch, 1U, &given, static_cast<IoEvent*>(events), &moment);
    CHECK(given == 0);
    SAYS(success, "cuFileBatchIOCancel", batch);
    auto rest = ended(batch, 2);
    CHECK(rest[2].status == io_canceled && rest[3].status == io_canceled);
    call<void>("cuFileBatchIODestroy", batch);
}

// A batch that is given back while bytes move waits for them: the caller may free the memory afterwards.
void what_moves_bytes_is_waited_for() {
    const Scene scene;
    plan("cufile.route call=1 delay_us=300000");
    const BatchHandle batch = set_up(4);
    CHECK(submit(batch, {entry_of(scene, 3)}) == success);
    // Until it is held up in the middle of its transfer.
    while (ledger().find("cufile.route", ledger().find("\"delayed\"")) == std::string::npos) {
        sched_yield();
    }
    call<void>("cuFileBatchIODestroy", batch);
    CHECK(cuda::read_device(scene.memory + 3 * page, page) ==
          std::vector(scene.bytes.begin() + 3 * page, scene.bytes.begin() + 4 * page));
}

// Each thread with a batch of its own, given back while some of its transfers are under way.
void threads_do_not_disturb_each_other() {
    const Scene scene;
    std::atomic<int> complete{0};
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&scene, &complete, thread] {
            for (int round = 0; round < 8; ++round) {
                const BatchHandle batch = set_up(8);
                CHECK(submit(batch, {entry_of(scene, thread), entry_of(scene, thread + 4)}) == success);
                if (round % 2 == 0) {
                    complete += static_cast<int>(ended(batch, 2).size());
                }
                call<void>("cuFileBatchIODestroy", batch);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(complete == 4 * 4 * 2);
    CHECK(ledger().find("cufile_batch") == std::string::npos);
}

} // namespace

int main() {
    a_batch_moves_everything_once();
    what_cannot_be_right_is_refused();
    one_that_fails_does_not_end_the_others();
    a_stall_is_seen_and_can_be_canceled();
    what_moves_bytes_is_waited_for();
    threads_do_not_disturb_each_other();
}
