// A replacement of libfuse's fuse_reply_ioctl, which can omit the result of an ioctl.
//
// The numbers of some ioctls of 3FS contain the size of a result, but programs call these ioctls without an argument.
// libfuse's path-based interface always returns as many bytes as the number contains. The kernel then fails to copy
// these bytes to the program and returns EFAULT. If the reply has no bytes, the kernel copies nothing. This library is
// loaded before libfuse, so that libfuse calls the function here. A libfuse that was linked with -Bsymbolic-functions
// calls its own function.
#include <cerrno>
#include <cstddef>

namespace {

using Reply = int (*)(void* request, int status, const void* result, std::size_t bytes);

Reply libfuse_reply = nullptr;
thread_local bool is_result_omitted = false; // libfuse replies in the thread that called the handler of the ioctl.

} // namespace

extern "C" {

// Sets the function of libfuse. The caller sets it before the first mount.
void gdrkit_fuse_set_reply(Reply reply) {
    libfuse_reply = reply;
}

// Omits the result of the ioctl that this thread executes. The handler calls it last.
void gdrkit_fuse_omit_result() {
    is_result_omitted = true;
}

int fuse_reply_ioctl(void* request, int status, const void* result, std::size_t bytes) {
    const std::size_t reply_bytes = is_result_omitted ? 0 : bytes;
    is_result_omitted = false;
    return libfuse_reply == nullptr ? -ENOSYS : libfuse_reply(request, status, result, reply_bytes);
}

} // extern "C"
