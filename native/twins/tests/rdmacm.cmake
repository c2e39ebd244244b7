# Unit tests of the twin of librdmacm: plain programs that link it and the verbs twin.

set(rdmacm_tests addresses connections datagrams endpoints exports processes socket_ends sockets)
foreach(name IN LISTS rdmacm_tests)
  add_executable(rdmacm_${name} ${CMAKE_CURRENT_LIST_DIR}/rdmacm_${name}.cpp)
  target_link_libraries(rdmacm_${name} PRIVATE rdmacm_twin ibverbs_twin gdrkit_twin_model)
  target_compile_definitions(rdmacm_${name} PRIVATE
    GDRKIT_CONTRACTS="${CMAKE_CURRENT_LIST_DIR}/../contracts" GDRKIT_LIBRARY="$<TARGET_FILE:rdmacm_twin>")
  add_test(NAME rdmacm.${name} COMMAND rdmacm_${name})
  set_tests_properties(rdmacm.${name} PROPERTIES TIMEOUT 120)
endforeach()

# This test is built only if the real headers are installed. Users do not need them.
find_path(GDRKIT_RDMACM_HEADERS rdma/rdma_cma.h)
if(GDRKIT_RDMACM_HEADERS)
  add_executable(rdmacm_abi ${CMAKE_CURRENT_LIST_DIR}/rdmacm_abi.cpp)
  target_include_directories(rdmacm_abi PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
  target_include_directories(rdmacm_abi SYSTEM PRIVATE ${GDRKIT_RDMACM_HEADERS})
  add_test(NAME rdmacm.abi COMMAND rdmacm_abi)
endif()
