// Tests of releasing objects: with live children, twice, and objects that never existed.
#include <sys/wait.h>

#include <functional>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// Run `body` in a child, which must die by SIGABRT. Return its stderr.
std::string abort_text(const std::function<void()>& body) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    close(ends[1]);
    std::string text;
    char buffer[4096];
    for (ssize_t count = 0; (count = read(ends[0], buffer, sizeof buffer)) > 0;) {
        text.append(buffer, static_cast<std::size_t>(count));
    }
    close(ends[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    return text;
}

void check_double_release(const char* kind, const std::function<void()>& body) {
    const std::string text = abort_text(body);
    const bool named = text.find(kind) != std::string::npos;
    const bool first = text.find("released first at") != std::string::npos;
    const bool again = text.find("released again at") != std::string::npos;
    if (!named || !first || !again) {
        std::fprintf(stderr, "%s", text.c_str());
    }
    CHECK(named && first && again);
}

// The children open everything themselves after the fork.
void test_double_release() {
    check_double_release("ibv_mr", [] {
        Endpoint a;
        Buffer buffer(a.pd, 10);
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
        Endpoint a;
        ibv_destroy_qp(a.qp);
        ibv_destroy_qp(a.qp);
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
    // A use after the release is detected too.
    check_double_release("ibv_qp", [] {
        Endpoint a;
        ibv_destroy_qp(a.qp);
        a.post_receive(1, {});
    });
}

void test_parents_with_children_are_busy() {
    Endpoint a;
    Buffer buffer(a.pd, 10);
    CHECK(ibv_dealloc_pd(a.pd) == EBUSY && ibv_destroy_cq(a.cq) == EBUSY && ibv_close_device(a.context) == EBUSY);
    CHECK(a.post_receive(1, {}) == EINVAL && a.to_init() == 0 && a.post_receive(1, {}) == 0);
}

void test_unknown_objects() {
    Endpoint a;
    ibv_mr mr{};
    ibv_pd pd{};
    pd.context = a.context;
    CHECK(ibv_dereg_mr(&mr) == EINVAL && ibv_dealloc_pd(&pd) == EINVAL);
    errno = 0;
    CHECK(ibv_reg_mr(&pd, &mr, sizeof mr, 0) == nullptr && errno == EINVAL);
}

} // namespace

int main() {
    use_own_domain();
    test_double_release();
    test_parents_with_children_are_busy();
    test_unknown_objects();
    return 0;
}
