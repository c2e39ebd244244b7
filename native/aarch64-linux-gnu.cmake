# A toolchain that builds for aarch64 with Debian's cross compiler, and runs the tests in QEMU's user mode. The folder in the
# environment variable GDRKIT_CROSS has the headers of libibverbs (include/infiniband) and a libibverbs.so to link with
# (lib). The cross compiler must not use /usr/include, which has the headers of this machine's libc.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
set(GDRKIT_VERBS_HEADERS $ENV{GDRKIT_CROSS}/include CACHE PATH "Folder with infiniband/verbs.h")
foreach(language C CXX)
  set(CMAKE_${language}_FLAGS_INIT "-isystem $ENV{GDRKIT_CROSS}/include")
endforeach()
foreach(type EXE SHARED MODULE)
  set(CMAKE_${type}_LINKER_FLAGS_INIT "-L$ENV{GDRKIT_CROSS}/lib")
endforeach()
