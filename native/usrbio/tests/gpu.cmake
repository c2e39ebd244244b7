# Tests of GPU iovs. They run on the libcuda.so.1 in the folder GDRKIT_CUDA, which is the software twin of libcuda. If
# GDRKIT_CUDA is empty, they run on the driver of the machine. Without a driver, only tests that need no device run.
set(GDRKIT_CUDA "" CACHE PATH "Folder with the libcuda.so.1 for the tests; empty: the driver of the machine")
find_library(GDRKIT_CUDA_DRIVER NAMES libcuda.so.1 HINTS ${GDRKIT_CUDA})

# gdrkit_gpu_test(name [folder]): the loader looks for libcuda.so.1 in this folder first.
function(gdrkit_gpu_test name)
  add_test(NAME usrbio.${name} COMMAND usrbio_${name}_test)
  set_tests_properties(usrbio.${name} PROPERTIES TIMEOUT 300 ENVIRONMENT
    "LD_LIBRARY_PATH=${ARGV1};GDRKIT_TWINS_DOMAIN=usrbio-${name}-${GDRKIT_BUILD_NAME};GDRKIT_TWINS_GPUS=2")
endfunction()

foreach(name share_handle gpu_target gpu_pool gpu_iov gpu_share gpu_agent gpu_fault gpu_absent)
  add_executable(usrbio_${name}_test ${name}_test.cpp)
  target_link_libraries(usrbio_${name}_test PRIVATE gdrkit_usrbio_client ${CMAKE_DL_LIBS} Threads::Threads)
  target_compile_definitions(usrbio_${name}_test PRIVATE
    GDRKIT_VECTORS="${PROJECT_SOURCE_DIR}/../suites/vectors")
endforeach()
gdrkit_gpu_test(share_handle)
gdrkit_gpu_test(gpu_target)
gdrkit_gpu_test(gpu_pool)
# A value that is not a number is reported and not used.
add_test(NAME usrbio.gpu_pool_environment COMMAND usrbio_gpu_pool_test second)
set_tests_properties(usrbio.gpu_pool_environment PROPERTIES ENVIRONMENT "GDRKIT_USRBIO_GPU_POOL_BYTES=256M")
if(GDRKIT_CUDA_DRIVER AND ENABLE_GDR)
  gdrkit_gpu_test(gpu_iov "${GDRKIT_CUDA}")
  gdrkit_gpu_test(gpu_share "${GDRKIT_CUDA}")
  gdrkit_gpu_test(gpu_agent "${GDRKIT_CUDA}")
  if(GDRKIT_CUDA) # Only the twin can be made to fail.
    gdrkit_gpu_test(gpu_fault "${GDRKIT_CUDA}")
  endif()
endif()

# A test without a driver, even on a machine that has one: the loader first finds a file that is not a library.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/no_cuda/libcuda.so.1 "")
gdrkit_gpu_test(gpu_absent "${CMAKE_CURRENT_BINARY_DIR}/no_cuda")

# A test with a driver and a library that was built without ENABLE_GDR.
add_executable(usrbio_gpu_off_test gpu_absent_test.cpp ../client/cuda_driver.cpp)
target_compile_options(usrbio_gpu_off_test PRIVATE -UHF3FS_ENABLE_GDR)
target_link_libraries(usrbio_gpu_off_test PRIVATE gdrkit_usrbio_client ${CMAKE_DL_LIBS} Threads::Threads)
gdrkit_gpu_test(gpu_off "${GDRKIT_CUDA}")
