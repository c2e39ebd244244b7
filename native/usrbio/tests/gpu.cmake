# Tests of the GPU extension. They run on the libcuda.so.1 in GDRKIT_CUDA, the folder of the software twin; if it is empty, on
# the driver of the machine. Without a driver, only tests that need no device run.
set(GDRKIT_CUDA "" CACHE PATH "Folder with the libcuda.so.1 that the tests run on; empty: that of the machine")
find_library(GDRKIT_CUDA_DRIVER NAMES libcuda.so.1 HINTS ${GDRKIT_CUDA})

function(gdrkit_gpu_test name)
  cmake_parse_arguments(PARSE_ARGV 1 TEST "" "LIBRARY_PATH" "LINK")
  add_test(NAME usrbio.${name} COMMAND usrbio_${name}_test)
  set_tests_properties(usrbio.${name} PROPERTIES TIMEOUT 300 ENVIRONMENT
    "LD_LIBRARY_PATH=${TEST_LIBRARY_PATH};GDRKIT_TWINS_DOMAIN=usrbio-${name};GDRKIT_TWINS_GPUS=2")
endfunction()

foreach(name share_handle gpu_target gpu_iov gpu_share gpu_agent gpu_fault gpu_absent)
  add_executable(usrbio_${name}_test ${name}_test.cpp)
  target_link_libraries(usrbio_${name}_test PRIVATE gdrkit_usrbio_client ${CMAKE_DL_LIBS} Threads::Threads)
  target_compile_definitions(usrbio_${name}_test PRIVATE
    GDRKIT_VECTORS="${PROJECT_SOURCE_DIR}/../suites/vectors")
endforeach()
gdrkit_gpu_test(share_handle)
gdrkit_gpu_test(gpu_target)
if(GDRKIT_CUDA_DRIVER AND ENABLE_GDR)
  gdrkit_gpu_test(gpu_iov LIBRARY_PATH "${GDRKIT_CUDA}")
  gdrkit_gpu_test(gpu_share LIBRARY_PATH "${GDRKIT_CUDA}")
  gdrkit_gpu_test(gpu_agent LIBRARY_PATH "${GDRKIT_CUDA}")
  if(GDRKIT_CUDA) # Only the twin can be made to fail.
    gdrkit_gpu_test(gpu_fault LIBRARY_PATH "${GDRKIT_CUDA}")
  endif()
endif()

# Without a driver, even if the machine has one: the loader first finds a file that is not a library.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/no_cuda/libcuda.so.1 "")
gdrkit_gpu_test(gpu_absent LIBRARY_PATH "${CMAKE_CURRENT_BINARY_DIR}/no_cuda")

# With a driver, and a library that was built without ENABLE_GDR.
add_executable(usrbio_gpu_off_test gpu_absent_test.cpp ../client/cuda_driver.cpp)
target_compile_options(usrbio_gpu_off_test PRIVATE -UHF3FS_ENABLE_GDR)
target_link_libraries(usrbio_gpu_off_test PRIVATE gdrkit_usrbio_client ${CMAKE_DL_LIBS} Threads::Threads)
gdrkit_gpu_test(gpu_off LIBRARY_PATH "${GDRKIT_CUDA}")
