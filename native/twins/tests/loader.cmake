# Test of the library for LD_AUDIT, with a copy of libibverbs like that in a Python wheel.

add_library(loader_copy SHARED ${CMAKE_CURRENT_LIST_DIR}/loader_copy.cpp)
set_target_properties(loader_copy PROPERTIES
  PREFIX "" SUFFIX "" OUTPUT_NAME libibverbs-0f9e8d7c.so.1.14.48.0
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/wheel.libs)
target_link_options(loader_copy PRIVATE -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/loader_copy.map)
add_executable(loader_client ${CMAKE_CURRENT_LIST_DIR}/loader_client.cpp)
target_include_directories(loader_client PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
target_link_libraries(loader_client PRIVATE loader_copy ${CMAKE_DL_LIBS})
target_link_options(loader_client PRIVATE -Wl,--disable-new-dtags)
if(NOT GDRKIT_SANITIZE)
  # The runtime of a sanitizer cannot be first in a process with LD_AUDIT unless it is preloaded.
  add_test(NAME loader.client COMMAND loader_client $<TARGET_FILE:loader_copy>)
  set_tests_properties(loader.client PROPERTIES TIMEOUT 60 ENVIRONMENT
    "LD_AUDIT=$<TARGET_FILE:twins_audit>;GDRKIT_TWINS_LIBRARIES=$<TARGET_FILE:ibverbs_twin>")
endif()
