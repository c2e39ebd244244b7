# gdrkit_precompile() gives one precompiled header to every C++ target below the calling folder. It has the standard
# headers that most files include, and halves the work of the compiler. A build with -DGDRKIT_PRECOMPILE=OFF shows that
# each file includes what it uses; `nox -s long` makes one.
option(GDRKIT_PRECOMPILE "Precompile the standard headers" ON)
set(GDRKIT_PRECOMPILED_HEADER ${CMAKE_CURRENT_LIST_DIR}/precompiled.hpp)

function(gdrkit_precompile)
  if(NOT GDRKIT_PRECOMPILE)
    return()
  endif()
  gdrkit_targets_below(${CMAKE_CURRENT_SOURCE_DIR} targets)
  # Libraries are compiled with -fPIC and executables with -fPIE, so each of the two needs a header of its own.
  file(CONFIGURE OUTPUT precompiled.cpp CONTENT "int main() { return 0; }\n")
  add_library(gdrkit_precompiled_library OBJECT ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cpp)
  add_executable(gdrkit_precompiled_executable EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cpp)
  foreach(target gdrkit_precompiled_library gdrkit_precompiled_executable)
    target_precompile_headers(${target} PRIVATE ${GDRKIT_PRECOMPILED_HEADER})
  endforeach()
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    get_target_property(sources ${target} SOURCES)
    get_target_property(options ${target} COMPILE_OPTIONS)
    get_target_property(optimized_at_link ${target} INTERPROCEDURAL_OPTIMIZATION)
    # nanobind compiles its modules with options of its own. A header that was compiled with exceptions cannot be used
    # without them.
    if(NOT type MATCHES "^(STATIC_LIBRARY|SHARED_LIBRARY|EXECUTABLE)$" OR NOT sources MATCHES "\\.cpp" OR target MATCHES "^nanobind" OR options MATCHES "-fno-exceptions")
      continue()
    elseif(optimized_at_link OR options MATCHES "-ftls-model")
      # The compiler accepts a precompiled header only with the options of the code generator that it was made with.
      target_precompile_headers(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${GDRKIT_PRECOMPILED_HEADER}>")
    elseif(type STREQUAL EXECUTABLE)
      target_precompile_headers(${target} REUSE_FROM gdrkit_precompiled_executable)
    else()
      target_precompile_headers(${target} REUSE_FROM gdrkit_precompiled_library)
    endif()
  endforeach()
endfunction()

function(gdrkit_targets_below folder result)
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  get_property(folders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(each IN LISTS folders)
    gdrkit_targets_below(${each} more)
    list(APPEND targets ${more})
  endforeach()
  set(${result} ${targets} PARENT_SCOPE)
endfunction()
