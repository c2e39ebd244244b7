# Unit tests of the twins of the CUDA runtime. They open the built libraries by their paths, as a C program does, and are
# compiled once for each version.
function(gdrkit_cudart_test major name)
  set(target cudart${major}_${name}test)
  add_executable(${target} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cudart_${name}test.cpp)
  add_dependencies(${target} cudart${major}_twin cuda_twin)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
  target_compile_definitions(${target} PRIVATE
    GDRKIT_CUDART_MAJOR=${major}
    GDRKIT_CUDA_TWIN="$<TARGET_FILE:cuda_twin>"
    GDRKIT_CUDART_TWIN="$<TARGET_FILE:cudart${major}_twin>"
    GDRKIT_CONTRACT="${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../contracts/cudart${major}.conventions")
  target_link_libraries(${target} PRIVATE gdrkit_twin_model)
  add_test(NAME ${target} COMMAND ${target})
  gdrkit_set_domain(domain ${target})
  set_tests_properties(${target} PROPERTIES TIMEOUT 120
    ENVIRONMENT "GDRKIT_TWINS_DOMAIN=${domain};TSAN_OPTIONS=die_after_fork=0")
endfunction()

foreach(major IN ITEMS 12 13)
  gdrkit_cudart_test(${major} "")
  gdrkit_cudart_test(${major} symbols_)
  gdrkit_cudart_test(${major} graph_)
endforeach()

# This test is built only if the real headers are installed. Their version decides which twin it compares.
find_path(GDRKIT_CUDART_HEADERS crt/host_defines.h PATHS /usr/local/cuda/include)
if(GDRKIT_CUDART_HEADERS)
  gdrkit_cudart_test(13 abi_)
  target_include_directories(cudart13_abi_test SYSTEM PRIVATE ${GDRKIT_CUDART_HEADERS})
endif()
