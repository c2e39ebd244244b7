# The unit tests of the verbs twin: plain programs against the real header, linked to the twin.

set(ibverbs_tests device errors events exports faults loading regions release states traffic two_processes)
foreach(name IN LISTS ibverbs_tests)
  add_executable(ibverbs_${name} ${CMAKE_CURRENT_LIST_DIR}/ibverbs_${name}.cpp)
  # The model makes dma-bufs for the tests; the twin has its own, hidden copy of it.
  target_link_libraries(ibverbs_${name} PRIVATE ibverbs_twin gdrkit_twin_model)
  target_compile_definitions(ibverbs_${name} PRIVATE
    GDRKIT_CONTRACTS="${CMAKE_CURRENT_LIST_DIR}/../contracts" GDRKIT_LIBRARY="$<TARGET_FILE:ibverbs_twin>")
  add_test(NAME ibverbs.${name} COMMAND ibverbs_${name})
  set_tests_properties(ibverbs.${name} PROPERTIES TIMEOUT 120)
endforeach()

# Device memory needs both twins.
add_executable(ibverbs_cuda ${CMAKE_CURRENT_LIST_DIR}/ibverbs_cuda.cpp)
target_link_libraries(ibverbs_cuda PRIVATE ibverbs_twin ${CMAKE_DL_LIBS})
target_include_directories(ibverbs_cuda PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
if(TARGET cuda_twin)
  add_test(NAME ibverbs.cuda COMMAND ibverbs_cuda $<TARGET_FILE:cuda_twin>)
  set_tests_properties(ibverbs.cuda PROPERTIES TIMEOUT 120)
endif()
