// Our semaphore functions against glibc's on the same words, and against words that a hostile peer wrote.
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

constexpr int rounds = 20000;
// glibc's sem_post passes this value to the futex system call. The kernel fails with ENOSYS, and glibc aborts.
constexpr std::uint32_t hostile_sharing = 0x40;

timespec in_ms(long milliseconds) {
    timespec when{};
    clock_gettime(CLOCK_REALTIME, &when);
    when.tv_nsec += milliseconds % 1000 * 1000000;
    when.tv_sec += milliseconds / 1000 + when.tv_nsec / 1000000000;
    when.tv_nsec %= 1000000000;
    return when;
}

// Shared between processes, as the memory of a ring is.
struct Shared {
    Shared() : words(static_cast<Semaphore*>(map())) { initialize(*words); }
    ~Shared() { munmap(words, sizeof(Semaphore)); }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;
    static void* map() {
        void* mapped = mmap(nullptr, sizeof(Semaphore), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(mapped != MAP_FAILED);
        return mapped;
    }
    sem_t* glibc() const { return reinterpret_cast<sem_t*>(words); }
    Semaphore* words;
};

struct Named {
    Named() : name("/gdrkit-semaphore-test." + std::to_string(getpid())), path("/dev/shm/sem." + name.substr(1)) {
        sem_unlink(name.c_str());
        glibc = sem_open(name.c_str(), O_CREAT | O_EXCL, 0600, 0);
        CHECK(glibc != SEM_FAILED);
        CHECK_EQUAL(ours.open(path.c_str()), 0);
        ours.restore();
    }
    ~Named() {
        sem_close(glibc);
        sem_unlink(name.c_str());
    }
    Semaphore* words() const { return reinterpret_cast<Semaphore*>(glibc); }
    std::string name, path;
    sem_t* glibc;
    NamedSemaphore ours;
};

void glibc_wait(sem_t* semaphore) {
    const timespec limit = in_ms(20000);
    CHECK_EQUAL(sem_timedwait(semaphore, &limit), 0);
}

void our_wait(Semaphore& semaphore) {
    const timespec limit = in_ms(20000);
    CHECK(wait_until(semaphore, &limit));
}

void words_are_those_of_sem_init() {
    alignas(sem_t) unsigned char theirs[sizeof(sem_t)] = {};
    alignas(Semaphore) unsigned char made[sizeof(Semaphore)] = {};
    CHECK_EQUAL(sem_init(reinterpret_cast<sem_t*>(theirs), 1, 0), 0);
    initialize(*reinterpret_cast<Semaphore*>(made));
    CHECK_EQUAL(std::memcmp(theirs, made, sizeof(made)), 0);
    // The value in the low half.
    CHECK_EQUAL(sem_init(reinterpret_cast<sem_t*>(theirs), 1, 7), 0);
    CHECK_EQUAL(reinterpret_cast<Semaphore*>(theirs)->word.load(), 7u);
}

void waiter_of_glibc_counts_in_high_half() {
    const Shared shared;
    std::thread waiter([&] { glibc_wait(shared.glibc()); });
    while (shared.words->word.load() != semaphore_one_waiter) {
        std::this_thread::yield();
    }
    post(*shared.words);
    waiter.join();
    CHECK_EQUAL(shared.words->word.load(), 0u);
}

void glibc_and_ours_wake_each_other() {
    const Shared there, back;
    std::thread peer([&] {
        for (int i = 0; i < rounds; ++i) {
            glibc_wait(there.glibc());
            CHECK_EQUAL(sem_post(back.glibc()), 0);
        }
    });
    for (int i = 0; i < rounds; ++i) {
        post(*there.words);
        our_wait(*back.words);
    }
    peer.join();
    CHECK_EQUAL(there.words->word.load(), 0u);
    CHECK_EQUAL(back.words->word.load(), 0u);
}

void mixed_waiters_share_mixed_posts() {
    const Shared shared;
    std::thread theirs([&] {
        for (int i = 0; i < rounds; ++i) {
            glibc_wait(shared.glibc());
        }
    });
    std::thread ours([&] {
        for (int i = 0; i < rounds; ++i) {
            our_wait(*shared.words);
        }
    });
    for (int i = 0; i < rounds; ++i) {
        post(*shared.words);
        CHECK_EQUAL(sem_post(shared.glibc()), 0);
    }
    theirs.join();
    ours.join();
    CHECK_EQUAL(shared.words->word.load(), 0u);
}

void deadline_ends_a_wait() {
    const Shared shared;
    const timespec soon = in_ms(5);
    CHECK(!wait_until(*shared.words, &soon));
    CHECK_EQUAL(shared.words->word.load(), 0u);
    // A post that has arrived is taken even if the deadline has passed.
    post(*shared.words);
    CHECK(wait_until(*shared.words, &soon));
    CHECK(!try_wait(*shared.words));
}

void nonsense_in_a_semaphore_aborts_nobody() {
    const Shared shared;
    for (const std::uint32_t sharing : {hostile_sharing, 1u, 0x80000000u, 0xffffffffu}) {
        for (const std::uint32_t waiters : {0u, 1u, 0x7fffffffu, 0xffffffffu}) {
            for (const std::uint32_t value : {0u, 1u, semaphore_value_max, semaphore_value_max + 1, 0xffffffffu}) {
                shared.words->sharing = sharing;
                shared.words->word = std::uint64_t{waiters} << 32 | value;
                post(*shared.words);
                CHECK(try_wait(*shared.words));
                const timespec soon = in_ms(0);
                wait_until(*shared.words, &soon);
            }
        }
    }
}

void largest_value_stays_and_its_waiter_wakes() {
    const Shared shared;
    for (const std::uint32_t value : {semaphore_value_max, 0xffffffffu}) {
        shared.words->word = value;
        post(*shared.words);
        CHECK_EQUAL(shared.words->word.load(), value);
    }
    // A waiter that sleeps, and then the value jumps to the largest one.
    shared.words->word = 0;
    std::thread waiter([&] { our_wait(*shared.words); });
    while (shared.words->word.load() != semaphore_one_waiter) {
        std::this_thread::yield();
    }
    shared.words->word = semaphore_one_waiter | semaphore_value_max;
    post(*shared.words);
    waiter.join();
}

void named_semaphore_wakes_glibc_and_is_woken_by_it() {
    Named there;
    std::thread daemon([&] { // As 3FS's daemon waits.
        for (int i = 0; i < rounds; ++i) {
            glibc_wait(there.glibc);
        }
    });
    for (int i = 0; i < rounds; ++i) {
        there.ours.post();
    }
    daemon.join();
    // As 3FS's client posts: one wake-up stands for all.
    CHECK_EQUAL(sem_post(there.glibc), 0);
    CHECK_EQUAL(sem_post(there.glibc), 0);
    CHECK(there.ours.take_all(1000));
    CHECK(!there.ours.take_all(1));
    std::atomic<bool> taken{false};
    std::thread watcher([&] {
        while (!there.ours.take_all(20000)) {
        }
        taken = true;
    });
    while (!taken) {
        CHECK_EQUAL(sem_post(there.glibc), 0);
    }
    watcher.join();
}

void named_semaphore_is_restored_after_nonsense() {
    Named named;
    named.words()->sharing = hostile_sharing;
    named.words()->word = semaphore_value_max; // And no waiter: glibc's clients would wake nobody.
    named.ours.post();
    CHECK(named.ours.take_all(1000));
    named.ours.restore();
    CHECK_EQUAL(named.words()->sharing, semaphore_shared);
    CHECK_EQUAL(named.words()->word.load(), semaphore_one_waiter);
    CHECK_EQUAL(sem_post(named.glibc), 0);
    CHECK(named.ours.take_all(1000));
}

void named_semaphore_that_is_cut_short_gets_its_size_back() {
    Named named;
    NamedSemaphore client;
    CHECK_EQUAL(client.open(named.path.c_str()), 0);
    CHECK_EQUAL(truncate(named.path.c_str(), 0), 0);
    client.post(); // Without SIGBUS.
    CHECK(!named.ours.take_all(1));
    struct stat found {};
    CHECK_EQUAL(stat(named.path.c_str(), &found), 0);
    CHECK_EQUAL(found.st_size, static_cast<off_t>(sizeof(Semaphore)));
    client.post();
    CHECK(named.ours.take_all(1000));
    CHECK_EQUAL(named.words()->sharing, semaphore_shared);
}

void only_a_semaphore_is_opened() {
    const Named named;
    NamedSemaphore semaphore;
    CHECK_EQUAL(semaphore.open("/dev/shm/sem.gdrkit-semaphore-test.none"), -ENOENT);
    CHECK_EQUAL(semaphore.open("/dev/shm"), -EISDIR);
    const std::string other = named.path + ".other";
    unlink(other.c_str());
    CHECK_EQUAL(symlink(named.path.c_str(), other.c_str()), 0);
    CHECK_EQUAL(semaphore.open(other.c_str()), -ELOOP);
    CHECK_EQUAL(unlink(other.c_str()), 0);
    CHECK_EQUAL(mkfifo(other.c_str(), 0600), 0);
    CHECK_EQUAL(semaphore.open(other.c_str()), -EINVAL);
    CHECK_EQUAL(unlink(other.c_str()), 0);
    CHECK_EQUAL(truncate(named.path.c_str(), 0), 0);
    CHECK_EQUAL(semaphore.open(named.path.c_str()), 0);
    semaphore.post();
}

} // namespace

int main() {
    words_are_those_of_sem_init();
    waiter_of_glibc_counts_in_high_half();
    glibc_and_ours_wake_each_other();
    mixed_waiters_share_mixed_posts();
    deadline_ends_a_wait();
    nonsense_in_a_semaphore_aborts_nobody();
    largest_value_stays_and_its_waiter_wakes();
    named_semaphore_wakes_glibc_and_is_woken_by_it();
    named_semaphore_is_restored_after_nonsense();
    named_semaphore_that_is_cut_short_gets_its_size_back();
    only_a_semaphore_is_opened();
}
