# Type stubs of the Python modules, written by nanobind.stubgen. They are committed, so that mypy and editors know the
# modules in a checkout that was never built. A test compares each with what the built module gives.

set(GDRKIT_PACKAGE ${CMAKE_CURRENT_LIST_DIR}/../gdrkit)
if(GDRKIT_PYTHON AND BUILD_TESTING)
  # `cmake --build --preset release --target stubs` writes the stubs into the checkout.
  add_custom_target(stubs)
endif()

# gdrkit_stub(target folder): target is a Python module of the package gdrkit/<folder>.
function(gdrkit_stub target folder)
  if(NOT BUILD_TESTING)
    return()
  endif()
  get_target_property(module ${target} OUTPUT_NAME)
  if(NOT module)
    set(module ${target})
  endif()
  set(built ${CMAKE_CURRENT_BINARY_DIR}/${module}.pyi)
  set(committed ${GDRKIT_PACKAGE}/${folder}/${module}.pyi)
  nanobind_add_stub(${target}_stub MODULE ${module} OUTPUT ${built}
                    PYTHON_PATH $<TARGET_FILE_DIR:${target}> DEPENDS ${target})
  add_custom_target(${target}_stub_copy COMMAND ${CMAKE_COMMAND} -E copy ${built} ${committed} DEPENDS ${target}_stub)
  add_dependencies(stubs ${target}_stub_copy)
  add_test(NAME stub.${folder}.${module} COMMAND diff -u ${committed} ${built})
  set_tests_properties(stub.${folder}.${module} PROPERTIES LABELS release)
endfunction()
