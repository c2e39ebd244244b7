// Tests that the semaphore functions of usrbio/ring work together with glibc's functions on the same semaphore, and
// tolerate any values that a hostile process writes into the semaphore.
#include "tests/check.hpp"
#include "usrbio/ring/named_semaphore.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

using namespace gdrkit::usrbio;

namespace {

constexpr int round_count = 20000;
// A hostile value of Semaphore::sharing. glibc's sem_post derives the flags of the futex system call from this value.
// With these flags, the call fails with ENOSYS, and glibc aborts the process.
constexpr std::uint32_t hostile_sharing = 0x40;

timespec make_deadline_after(long timeout_ms) {
    timespec deadline{};
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_nsec += timeout_ms % 1000 * 1000000;
    deadline.tv_sec += timeout_ms / 1000 + deadline.tv_nsec / 1000000000;
    deadline.tv_nsec %= 1000000000;
    return deadline;
}

// A semaphore in memory that processes can share, like the completion semaphore of a ring.
struct SharedSemaphore {
    SharedSemaphore() : semaphore(static_cast<Semaphore*>(map())) { initialize(*semaphore); }
    ~SharedSemaphore() { munmap(semaphore, sizeof(Semaphore)); }
    SharedSemaphore(const SharedSemaphore&) = delete;
    SharedSemaphore& operator=(const SharedSemaphore&) = delete;
    static void* map() {
        void* memory = mmap(nullptr, sizeof(Semaphore), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED);
        return memory;
    }
    sem_t* as_glibc() const { return reinterpret_cast<sem_t*>(semaphore); }
    Semaphore* semaphore;
};

// A named semaphore that is open twice: by glibc's sem_open, and as a NamedSemaphore of gdrkit.
struct TwiceOpenedSemaphore {
    TwiceOpenedSemaphore()
        : name("/gdrkit-semaphore-test." + std::to_string(getpid())), path("/dev/shm/sem." + name.substr(1)) {
        sem_unlink(name.c_str());
        glibc_handle = sem_open(name.c_str(), O_CREAT | O_EXCL, 0600, 0);
        CHECK(glibc_handle != SEM_FAILED);
        CHECK_EQUAL(gdrkit_handle.open(path.c_str()), 0);
        gdrkit_handle.restore();
    }
    ~TwiceOpenedSemaphore() {
        sem_close(glibc_handle);
        sem_unlink(name.c_str());
    }
    Semaphore* as_gdrkit() const { return reinterpret_cast<Semaphore*>(glibc_handle); }
    std::string name, path;
    sem_t* glibc_handle;
    NamedSemaphore gdrkit_handle;
};

void wait_with_glibc(sem_t* semaphore) {
    const timespec deadline = make_deadline_after(20000);
    CHECK_EQUAL(sem_timedwait(semaphore, &deadline), 0);
}

void wait_with_gdrkit(Semaphore& semaphore) {
    const timespec deadline = make_deadline_after(20000);
    CHECK(wait_until(semaphore, &deadline));
}

void test_initialize_equals_sem_init() {
    alignas(sem_t) unsigned char glibc_bytes[sizeof(sem_t)] = {};
    alignas(Semaphore) unsigned char gdrkit_bytes[sizeof(Semaphore)] = {};
    CHECK_EQUAL(sem_init(reinterpret_cast<sem_t*>(glibc_bytes), 1, 0), 0);
    initialize(*reinterpret_cast<Semaphore*>(gdrkit_bytes));
    CHECK_EQUAL(std::memcmp(glibc_bytes, gdrkit_bytes, sizeof(gdrkit_bytes)), 0);
    // glibc stores the value in the low half of the word.
    CHECK_EQUAL(sem_init(reinterpret_cast<sem_t*>(glibc_bytes), 1, 7), 0);
    CHECK_EQUAL(reinterpret_cast<Semaphore*>(glibc_bytes)->word.load(), 7u);
}

void test_glibc_waiter_counts_in_high_half() {
    const SharedSemaphore shared;
    std::thread waiter([&] { wait_with_glibc(shared.as_glibc()); });
    while (shared.semaphore->word.load() != semaphore_one_waiter) {
        std::this_thread::yield();
    }
    post(*shared.semaphore);
    waiter.join();
    CHECK_EQUAL(shared.semaphore->word.load(), 0u);
}

void test_glibc_and_gdrkit_wake_each_other() {
    const SharedSemaphore request, response;
    std::thread peer([&] {
        for (int i = 0; i < round_count; ++i) {
            wait_with_glibc(request.as_glibc());
            CHECK_EQUAL(sem_post(response.as_glibc()), 0);
        }
    });
    for (int i = 0; i < round_count; ++i) {
        post(*request.semaphore);
        wait_with_gdrkit(*response.semaphore);
    }
    peer.join();
    CHECK_EQUAL(request.semaphore->word.load(), 0u);
    CHECK_EQUAL(response.semaphore->word.load(), 0u);
}

void test_mixed_waiters_share_mixed_posts() {
    const SharedSemaphore shared;
    std::thread glibc_waiter([&] {
        for (int i = 0; i < round_count; ++i) {
            wait_with_glibc(shared.as_glibc());
        }
    });
    std::thread gdrkit_waiter([&] {
        for (int i = 0; i < round_count; ++i) {
            wait_with_gdrkit(*shared.semaphore);
        }
    });
    for (int i = 0; i < round_count; ++i) {
        post(*shared.semaphore);
        CHECK_EQUAL(sem_post(shared.as_glibc()), 0);
    }
    glibc_waiter.join();
    gdrkit_waiter.join();
    CHECK_EQUAL(shared.semaphore->word.load(), 0u);
}

void test_deadline_ends_a_wait() {
    const SharedSemaphore shared;
    const timespec short_deadline = make_deadline_after(5);
    CHECK(!wait_until(*shared.semaphore, &short_deadline));
    CHECK_EQUAL(shared.semaphore->word.load(), 0u);
    // A wait takes a post that has already come, even if the deadline of the wait has passed.
    post(*shared.semaphore);
    CHECK(wait_until(*shared.semaphore, &short_deadline));
    CHECK(!try_wait(*shared.semaphore));
}

void test_hostile_words_do_not_abort() {
    const SharedSemaphore shared;
    for (const std::uint32_t sharing : {hostile_sharing, 1u, 0x80000000u, 0xffffffffu}) {
        for (const std::uint32_t waiter_count : {0u, 1u, 0x7fffffffu, 0xffffffffu}) {
            for (const std::uint32_t value : {0u, 1u, semaphore_value_max, semaphore_value_max + 1, 0xffffffffu}) {
                shared.semaphore->sharing = sharing;
                shared.semaphore->word = std::uint64_t{waiter_count} << 32 | value;
                post(*shared.semaphore);
                CHECK(try_wait(*shared.semaphore));
                const timespec past_deadline = make_deadline_after(0);
                wait_until(*shared.semaphore, &past_deadline);
            }
        }
    }
}

void test_largest_value_stays_and_waiter_wakes() {
    const SharedSemaphore shared;
    for (const std::uint32_t value : {semaphore_value_max, 0xffffffffu}) {
        shared.semaphore->word = value;
        post(*shared.semaphore);
        CHECK_EQUAL(shared.semaphore->word.load(), value);
    }
    // While a waiter sleeps, the value becomes SEM_VALUE_MAX. post() must still wake the waiter.
    shared.semaphore->word = 0;
    std::thread waiter([&] { wait_with_gdrkit(*shared.semaphore); });
    while (shared.semaphore->word.load() != semaphore_one_waiter) {
        std::this_thread::yield();
    }
    shared.semaphore->word = semaphore_one_waiter | semaphore_value_max;
    post(*shared.semaphore);
    waiter.join();
}

void test_named_semaphore_and_glibc_wake_each_other() {
    TwiceOpenedSemaphore request;
    // The daemon of 3FS waits by sem_wait of glibc.
    std::thread daemon([&] {
        for (int i = 0; i < round_count; ++i) {
            wait_with_glibc(request.glibc_handle);
        }
    });
    for (int i = 0; i < round_count; ++i) {
        request.gdrkit_handle.post();
    }
    daemon.join();
    // The client of 3FS posts by sem_post of glibc. One wake-up serves all posts.
    CHECK_EQUAL(sem_post(request.glibc_handle), 0);
    CHECK_EQUAL(sem_post(request.glibc_handle), 0);
    CHECK(request.gdrkit_handle.wait_and_reset(1000));
    CHECK(!request.gdrkit_handle.wait_and_reset(1));
    // sem_post of glibc also wakes a thread that sleeps in wait_and_reset().
    std::atomic<bool> is_woken{false};
    std::thread waiter([&] {
        while (!request.gdrkit_handle.wait_and_reset(20000)) {
        }
        is_woken = true;
    });
    while (!is_woken) {
        CHECK_EQUAL(sem_post(request.glibc_handle), 0);
    }
    waiter.join();
}

void test_named_semaphore_is_restored_after_hostile_values() {
    TwiceOpenedSemaphore named_semaphore;
    named_semaphore.as_gdrkit()->sharing = hostile_sharing;
    // The number of waiters is 0, so sem_post of glibc would wake no waiter.
    named_semaphore.as_gdrkit()->word = semaphore_value_max;
    named_semaphore.gdrkit_handle.post();
    CHECK(named_semaphore.gdrkit_handle.wait_and_reset(1000));
    named_semaphore.gdrkit_handle.restore();
    CHECK_EQUAL(named_semaphore.as_gdrkit()->sharing, semaphore_shared);
    CHECK_EQUAL(named_semaphore.as_gdrkit()->word.load(), semaphore_one_waiter);
    CHECK_EQUAL(sem_post(named_semaphore.glibc_handle), 0);
    CHECK(named_semaphore.gdrkit_handle.wait_and_reset(1000));
}

void test_truncated_named_semaphore_gets_its_size_back() {
    TwiceOpenedSemaphore named_semaphore;
    NamedSemaphore client_handle;
    CHECK_EQUAL(client_handle.open(named_semaphore.path.c_str()), 0);
    CHECK_EQUAL(truncate(named_semaphore.path.c_str(), 0), 0);
    client_handle.post(); // post() must not raise SIGBUS.
    CHECK(!named_semaphore.gdrkit_handle.wait_and_reset(1));
    struct stat attributes {};
    CHECK_EQUAL(stat(named_semaphore.path.c_str(), &attributes), 0);
    CHECK_EQUAL(attributes.st_size, static_cast<off_t>(sizeof(Semaphore)));
    client_handle.post();
    CHECK(named_semaphore.gdrkit_handle.wait_and_reset(1000));
    CHECK_EQUAL(named_semaphore.as_gdrkit()->sharing, semaphore_shared);
}

void test_open_refuses_other_files() {
    const TwiceOpenedSemaphore named_semaphore;
    NamedSemaphore semaphore;
    CHECK_EQUAL(semaphore.open("/dev/shm/sem.gdrkit-semaphore-test.none"), -ENOENT);
    CHECK_EQUAL(semaphore.open("/dev/shm"), -EISDIR);
    const std::string other_path = named_semaphore.path + ".other";
    unlink(other_path.c_str());
    CHECK_EQUAL(symlink(named_semaphore.path.c_str(), other_path.c_str()), 0);
    CHECK_EQUAL(semaphore.open(other_path.c_str()), -ELOOP);
    CHECK_EQUAL(unlink(other_path.c_str()), 0);
    CHECK_EQUAL(mkfifo(other_path.c_str(), 0600), 0);
    CHECK_EQUAL(semaphore.open(other_path.c_str()), -EINVAL);
    CHECK_EQUAL(unlink(other_path.c_str()), 0);
    // An empty file is not refused, because a client may have truncated the file.
    CHECK_EQUAL(truncate(named_semaphore.path.c_str(), 0), 0);
    CHECK_EQUAL(semaphore.open(named_semaphore.path.c_str()), 0);
    semaphore.post();
}

} // namespace

int main() {
    test_initialize_equals_sem_init();
    test_glibc_waiter_counts_in_high_half();
    test_glibc_and_gdrkit_wake_each_other();
    test_mixed_waiters_share_mixed_posts();
    test_deadline_ends_a_wait();
    test_hostile_words_do_not_abort();
    test_largest_value_stays_and_waiter_wakes();
    test_named_semaphore_and_glibc_wake_each_other();
    test_named_semaphore_is_restored_after_hostile_values();
    test_truncated_named_semaphore_gets_its_size_back();
    test_open_refuses_other_files();
}
