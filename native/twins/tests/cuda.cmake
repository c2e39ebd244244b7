# Unit tests of the CUDA twin. They open the built library by its path, as a C program does. They link a copy of model/.
# The twin contains another copy, whose symbols are hidden.
function(gdrkit_cuda_test name)
  add_executable(cuda_${name}_test ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cuda_${name}_test.cpp)
  add_dependencies(cuda_${name}_test cuda_twin)
  target_include_directories(cuda_${name}_test PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR}
                             ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
  target_compile_definitions(cuda_${name}_test PRIVATE
    GDRKIT_CUDA_TWIN="$<TARGET_FILE:cuda_twin>"
    GDRKIT_CONTRACTS="${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../contracts")
  target_link_libraries(cuda_${name}_test PRIVATE gdrkit_twin_model)
  add_test(NAME cuda_${name} COMMAND cuda_${name}_test)
  gdrkit_set_domain(domain cuda_${name})
  # These tests fork while threads run, which ThreadSanitizer must accept.
  set_tests_properties(cuda_${name} PROPERTIES TIMEOUT 120
    ENVIRONMENT "GDRKIT_TWINS_DOMAIN=${domain};TSAN_OPTIONS=die_after_fork=0")
endfunction()

foreach(name IN ITEMS symbols device context green_context memory managed rows host dmabuf stream ipc ipc_event vmm pool pool_ipc graph capture array tensor_map texture control thread exit)
  gdrkit_cuda_test(${name})
endforeach()

# This test is built only if the real cuda.h is installed. Users do not need that header.
find_path(GDRKIT_CUDA_HEADERS cuda.h PATHS /usr/local/cuda/include)
if(GDRKIT_CUDA_HEADERS)
  gdrkit_cuda_test(abi)
  target_include_directories(cuda_abi_test SYSTEM PRIVATE ${GDRKIT_CUDA_HEADERS})
endif()
