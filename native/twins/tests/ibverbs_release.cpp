// Tests of the software twin of libibverbs: the release of an object that other objects still use, of an object that
// the program has released before, and of an object that libibverbs has not created.
#include <sys/wait.h>

#include <functional>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// Run `body` in a child process, which must abort, and return the stderr of the child.
std::string capture_abort_text(const std::function<void()>& body) {
    int pipe_fds[2];
    CHECK(pipe(pipe_fds) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipe_fds[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    close(pipe_fds[1]);
    std::string stderr_text;
    char buffer[4096];
    for (ssize_t count = 0; (count = read(pipe_fds[0], buffer, sizeof buffer)) > 0;) {
        stderr_text.append(buffer, static_cast<std::size_t>(count));
    }
    close(pipe_fds[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    return stderr_text;
}

// Check that `body` aborts, and that the error text names the type of the object and the places of both releases.
void check_double_release(const char* type_name, const std::function<void()>& body) {
    const std::string stderr_text = capture_abort_text(body);
    const bool has_type_name = stderr_text.find(type_name) != std::string::npos;
    const bool has_first_release = stderr_text.find("released first at") != std::string::npos;
    const bool has_second_release = stderr_text.find("released again at") != std::string::npos;
    if (!has_type_name || !has_first_release || !has_second_release) {
        std::fprintf(stderr, "%s", stderr_text.c_str());
    }
    CHECK(has_type_name && has_first_release && has_second_release);
}

// Each function passed to check_double_release() opens its device in the child process, because a fork does not copy
// the threads of the twin.
void test_double_release_aborts() {
    check_double_release("ibv_mr", [] {
        Endpoint endpoint;
        Buffer buffer(endpoint.pd, 10);
        ibv_dereg_mr(buffer.mr);
        ibv_dereg_mr(buffer.mr);
    });
    check_double_release("ibv_pd", [] {
        ibv_pd* const pd = ibv_alloc_pd(open_device(0));
        ibv_dealloc_pd(pd);
        ibv_dealloc_pd(pd);
    });
    check_double_release("ibv_cq", [] {
        ibv_cq* const cq = ibv_create_cq(open_device(0), 1, nullptr, nullptr, 0);
        ibv_destroy_cq(cq);
        ibv_destroy_cq(cq);
    });
    check_double_release("ibv_qp", [] {
        Endpoint endpoint;
        ibv_destroy_qp(endpoint.qp);
        ibv_destroy_qp(endpoint.qp);
    });
    check_double_release("ibv_comp_channel", [] {
        ibv_comp_channel* const channel = ibv_create_comp_channel(open_device(0));
        ibv_destroy_comp_channel(channel);
        ibv_destroy_comp_channel(channel);
    });
    check_double_release("ibv_context", [] {
        ibv_context* const context = open_device(0);
        ibv_close_device(context);
        ibv_close_device(context);
    });
    // The twin also detects a use after the release.
    check_double_release("ibv_qp", [] {
        Endpoint endpoint;
        ibv_destroy_qp(endpoint.qp);
        endpoint.post_receive(1, {});
    });
}

void test_parents_with_children_are_busy() {
    Endpoint endpoint;
    Buffer buffer(endpoint.pd, 10);
    CHECK(ibv_dealloc_pd(endpoint.pd) == EBUSY && ibv_destroy_cq(endpoint.cq) == EBUSY);
    // The refused calls have not changed the objects: the queue pair takes receives in INIT, but not in RESET.
    CHECK(endpoint.post_receive(1, {}) == EINVAL && endpoint.modify_to_init() == 0 &&
          endpoint.post_receive(1, {}) == 0);
}

// A device can be closed while objects of it exist, as with rdma-core.
void test_device_with_objects_can_be_closed() {
    ibv_context* const context = open_device(0);
    CHECK(ibv_alloc_pd(context) != nullptr && ibv_close_device(context) == 0 && context->async_fd == -1);
}

void test_unknown_objects_are_refused() {
    Endpoint endpoint;
    ibv_mr mr{};
    ibv_pd pd{};
    pd.context = endpoint.context;
    CHECK(ibv_dereg_mr(&mr) == EINVAL && ibv_dealloc_pd(&pd) == EINVAL);
    errno = 0;
    CHECK(ibv_reg_mr(&pd, &mr, sizeof mr, 0) == nullptr && errno == EINVAL);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_double_release_aborts();
    test_parents_with_children_are_busy();
    test_device_with_objects_can_be_closed();
    test_unknown_objects_are_refused();
    return 0;
}
