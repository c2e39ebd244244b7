// A replacement for libfuse's fuse_reply_ioctl, which can omit the result of an ioctl.
//
// The numbers of some ioctls of 3FS contain the size of a result, but programs call these ioctls without memory for a
// result. libfuse's path-based interface always returns as many bytes as the number of the ioctl says. The kernel then
// fails to copy these bytes to the program and returns EFAULT. If the reply has no bytes, the kernel copies nothing.
// gdrkit loads this library before libfuse, so that libfuse calls the function fuse_reply_ioctl of this file. A libfuse
// that was linked with -Bsymbolic-functions calls its own function, so results are not omitted.
#include <cerrno>
#include <cstddef>

namespace {

using ReplyFunction = int (*)(void* request, int status, const void* result, std::size_t result_bytes);

ReplyFunction original_fuse_reply_ioctl = nullptr;
thread_local bool is_result_omitted = false; // libfuse replies in the thread that called the handler of the ioctl.

} // namespace

extern "C" {

// Sets the original function of libfuse, to which the replacement passes each reply. Call it before the first mount.
void gdrkit_fuse_set_reply(ReplyFunction reply) {
    original_fuse_reply_ioctl = reply;
}

// Omits the result of the ioctl that this thread executes. The handler of the ioctl calls this function at its end.
void gdrkit_fuse_omit_result() {
    is_result_omitted = true;
}

int fuse_reply_ioctl(void* request, int status, const void* result, std::size_t result_bytes) {
    const std::size_t reply_bytes = is_result_omitted ? 0 : result_bytes;
    is_result_omitted = false;
    return original_fuse_reply_ioctl == nullptr ? -ENOSYS
                                                : original_fuse_reply_ioctl(request, status, result, reply_bytes);
}

} // extern "C"
