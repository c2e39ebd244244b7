# Unit tests of the cuFile twin. They open the built library by its path, as a C program does. They open the CUDA twin
# first, because the cuFile twin needs a CUDA driver.
function(gdrkit_cufile_test name)
  add_executable(cufile_${name}_test ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cufile_${name}_test.cpp)
  add_dependencies(cufile_${name}_test cuda_twin cufile_twin)
  target_include_directories(cufile_${name}_test PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR}
                             ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
  # The test files are in the build folder, because cuFile does not register files of a tmpfs.
  target_compile_definitions(cufile_${name}_test PRIVATE
    GDRKIT_CUDA_TWIN="$<TARGET_FILE:cuda_twin>"
    GDRKIT_CUFILE_TWIN="$<TARGET_FILE:cufile_twin>"
    GDRKIT_DISK="${CMAKE_CURRENT_BINARY_DIR}"
    GDRKIT_CONTRACTS="${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../contracts")
  target_link_libraries(cufile_${name}_test PRIVATE gdrkit_twin_model)
  add_test(NAME cufile_${name} COMMAND cufile_${name}_test)
  gdrkit_set_domain(domain cufile_${name})
  # The tests fork while threads run, which ThreadSanitizer must accept.
  set_tests_properties(cufile_${name} PROPERTIES TIMEOUT 120
    ENVIRONMENT "GDRKIT_TWINS_DOMAIN=${domain};TSAN_OPTIONS=die_after_fork=0")
endfunction()

foreach(name IN ITEMS symbols transfer statistics batch stream version)
  gdrkit_cufile_test(${name})
endforeach()

# This test is built only if the real headers are installed. Users do not need them.
find_path(GDRKIT_CUFILE_HEADERS cufile.h PATHS /usr/local/cuda/include)
if(GDRKIT_CUFILE_HEADERS AND GDRKIT_CUDA_HEADERS)
  gdrkit_cufile_test(abi)
  target_include_directories(cufile_abi_test SYSTEM PRIVATE ${GDRKIT_CUFILE_HEADERS} ${GDRKIT_CUDA_HEADERS})
endif()
