# The tests of the CUDA twin: they open the built library by its path, as a C program does. The model that they link is
# their own; the twin has a hidden one.
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
  # A domain of its own, so that tests beside it are another machine. TSan forks without its threads on purpose here.
  set_tests_properties(cuda_${name} PROPERTIES TIMEOUT 120
    ENVIRONMENT "GDRKIT_TWINS_DOMAIN=cuda-${name};TSAN_OPTIONS=die_after_fork=0")
endfunction()

foreach(name IN ITEMS symbols device context memory host dmabuf stream ipc vmm pool control thread exit)
  gdrkit_cuda_test(${name})
endforeach()

# Only where the real header is: users' machines need none.
find_path(GDRKIT_CUDA_HEADERS cuda.h PATHS /usr/local/cuda/include)
if(GDRKIT_CUDA_HEADERS)
  gdrkit_cuda_test(abi)
  target_include_directories(cuda_abi_test SYSTEM PRIVATE ${GDRKIT_CUDA_HEADERS})
endif()
