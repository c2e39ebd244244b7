# Lets the libraries of a build run with the C++ library of GCC 11, as the platform tag manylinux_2_34 requires. Since GCC 12,
# std::condition_variable::wait has a symbol version that GCC 11 does not have. The linker replaces calls of it by those of a
# function in portable.cpp. `nox -s wheels` includes this file after project(), by the variable CMAKE_PROJECT_INCLUDE.
cmake_language(DEFER CALL gdrkit_wrap_wait ${CMAKE_CURRENT_SOURCE_DIR})
set(GDRKIT_PORTABLE_SOURCE ${CMAKE_CURRENT_LIST_DIR}/portable.cpp)

function(gdrkit_wrap_wait folder)
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  get_property(folders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    get_target_property(options ${target} LINK_OPTIONS)
    # Libraries that are linked without the C++ library cannot call the function.
    if(type MATCHES "^(SHARED_LIBRARY|MODULE_LIBRARY|EXECUTABLE)$" AND NOT options MATCHES "-nodefaultlibs")
      target_sources(${target} PRIVATE ${GDRKIT_PORTABLE_SOURCE})
      target_link_options(${target} PRIVATE LINKER:--wrap=_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE)
    endif()
  endforeach()
  foreach(each IN LISTS folders)
    gdrkit_wrap_wait(${each})
  endforeach()
endfunction()
