# Unit tests of the verbs twin: plain programs that include the real header and link the twin.

set(ibverbs_tests device errors events exit exports fabric faults lists loading many regions release shared_receives states traffic two_processes)
list(APPEND ibverbs_tests providers datagrams multicast unreliable xrc)
list(APPEND ibverbs_tests device_memory extended_cq extended_qp grants windows)
foreach(name IN LISTS ibverbs_tests)
  add_executable(ibverbs_${name} ${CMAKE_CURRENT_LIST_DIR}/ibverbs_${name}.cpp)
  # The tests create dma-bufs with a copy of model/. The twin contains another copy, whose symbols are hidden.
  target_link_libraries(ibverbs_${name} PRIVATE ibverbs_twin gdrkit_twin_model)
  target_compile_definitions(ibverbs_${name} PRIVATE
    GDRKIT_CONTRACTS="${CMAKE_CURRENT_LIST_DIR}/../contracts" GDRKIT_LIBRARY="$<TARGET_FILE:ibverbs_twin>")
  add_test(NAME ibverbs.${name} COMMAND ibverbs_${name})
  set_tests_properties(ibverbs.${name} PROPERTIES TIMEOUT 120)
endforeach()
set_tests_properties(ibverbs.providers PROPERTIES SKIP_RETURN_CODE 77)
# This test sends frames that no twin sends.
target_sources(ibverbs_multicast PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../ibverbs/datagram_frame.cpp)

# Tests with device memory need both twins.
add_executable(ibverbs_cuda ${CMAKE_CURRENT_LIST_DIR}/ibverbs_cuda.cpp)
target_link_libraries(ibverbs_cuda PRIVATE ibverbs_twin ${CMAKE_DL_LIBS})
target_include_directories(ibverbs_cuda PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
if(TARGET cuda_twin)
  add_test(NAME ibverbs.cuda COMMAND ibverbs_cuda $<TARGET_FILE:cuda_twin>)
  set_tests_properties(ibverbs.cuda PROPERTIES TIMEOUT 120)
endif()

# This test connects to queue pairs of the twin with the protocol code of the twin.
add_executable(ibverbs_hostile ${CMAKE_CURRENT_LIST_DIR}/ibverbs_hostile.cpp)
target_sources(ibverbs_hostile PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../ibverbs/bounce_buffer.cpp
  ${CMAKE_CURRENT_LIST_DIR}/../ibverbs/link.cpp ${CMAKE_CURRENT_LIST_DIR}/../ibverbs/pipe.cpp
  ${CMAKE_CURRENT_LIST_DIR}/../ibverbs/wire.cpp)
target_link_libraries(ibverbs_hostile PRIVATE ibverbs_twin gdrkit_twin_model)
target_include_directories(ibverbs_hostile PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
add_test(NAME ibverbs.hostile COMMAND ibverbs_hostile)
set_tests_properties(ibverbs.hostile PROPERTIES TIMEOUT 120)

# The test only checks that the benchmark runs. To measure, run the benchmark by hand.
add_executable(ibverbs_throughput ${CMAKE_CURRENT_LIST_DIR}/ibverbs_throughput.cpp)
target_link_libraries(ibverbs_throughput PRIVATE ibverbs_twin gdrkit_twin_model ${CMAKE_DL_LIBS})
target_include_directories(ibverbs_throughput PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
if(TARGET cuda_twin)
  add_test(NAME ibverbs.throughput COMMAND ibverbs_throughput 5 $<TARGET_FILE:cuda_twin>)
  set_tests_properties(ibverbs.throughput PROPERTIES TIMEOUT 120)
endif()
