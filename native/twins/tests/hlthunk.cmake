# Unit tests of the hl-thunk twin. They open the built library by its path, as a C program does.
function(gdrkit_hlthunk_program name)
  add_executable(hlthunk_${name}_test ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/hlthunk_${name}_test.cpp)
  add_dependencies(hlthunk_${name}_test hlthunk_twin)
  target_include_directories(hlthunk_${name}_test PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR}
                             ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
  target_compile_definitions(hlthunk_${name}_test PRIVATE
    GDRKIT_HLTHUNK_TWIN="$<TARGET_FILE:hlthunk_twin>"
    GDRKIT_CONTRACTS="${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../contracts")
  target_link_libraries(hlthunk_${name}_test PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
endfunction()

# Add a test that runs a program for one Gaudi generation, with the environment variables that follow.
function(gdrkit_hlthunk_test name generation)
  string(REGEX REPLACE "[^a-zA-Z0-9]" "" suffix "${generation}${ARGN}")
  gdrkit_set_domain(domain hlthunk.${name}.${suffix})
  add_test(NAME hlthunk.${name}.${suffix} COMMAND hlthunk_${name}_test)
  set_tests_properties(hlthunk.${name}.${suffix} PROPERTIES TIMEOUT 120
    ENVIRONMENT "GDRKIT_TWINS_DOMAIN=${domain};GDRKIT_TWINS_GAUDI=${generation};${ARGN}")
endfunction()

foreach(name IN ITEMS symbols rules copies lifetime)
  gdrkit_hlthunk_program(${name})
endforeach()
# This test imports its dma-bufs with the verbs twin.
target_link_libraries(hlthunk_lifetime_test PRIVATE ibverbs_twin)

foreach(generation IN ITEMS gaudi gaudi2 gaudi3)
  gdrkit_hlthunk_test(symbols ${generation})
  gdrkit_hlthunk_test(rules ${generation})
  gdrkit_hlthunk_test(rules ${generation} GDRKIT_TWINS_GAUDI_BAR_MIB=600)
  gdrkit_hlthunk_test(copies ${generation})
endforeach()
gdrkit_hlthunk_test(lifetime gaudi2)
gdrkit_hlthunk_test(lifetime gaudi3)
