# Unit test of the NVML twin. It opens the built libraries by their paths, as a C program does.
add_executable(nvml_test ${CMAKE_CURRENT_LIST_DIR}/nvml_test.cpp)
add_dependencies(nvml_test nvml_twin cuda_twin)
target_include_directories(nvml_test PRIVATE ${CMAKE_CURRENT_LIST_DIR} ${CMAKE_CURRENT_LIST_DIR}/..)
target_compile_definitions(nvml_test PRIVATE
  GDRKIT_CUDA_TWIN="$<TARGET_FILE:cuda_twin>"
  GDRKIT_NVML_TWIN="$<TARGET_FILE:nvml_twin>"
  GDRKIT_CONTRACTS="${CMAKE_CURRENT_LIST_DIR}/../contracts")
target_link_libraries(nvml_test PRIVATE gdrkit_twin_model)
add_test(NAME nvml COMMAND nvml_test)
gdrkit_set_domain(domain nvml)
set_tests_properties(nvml PROPERTIES TIMEOUT 60 ENVIRONMENT "GDRKIT_TWINS_DOMAIN=${domain};GDRKIT_TWINS_GPUS=3")
