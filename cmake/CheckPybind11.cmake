# Stops the configuration when the compiler would take a pybind11 other than torch's own.
#
# Types cross between torch._C and our module only when both were compiled against the same pybind11 internals; with
# another copy (PyPI's, a distribution's) the import fails with `unknown base type "c10d::Backend"`. Folders given as
# SYSTEM lose to CPATH, so reading the include list proves nothing: ask the compiler, with the flags it will get.
function(hpcomm_check_pybind11 torch_include_dirs python_include_dir)
  set(includes "-I${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  foreach(folder IN LISTS torch_include_dirs python_include_dir)
    list(APPEND includes -isystem "${folder}")
  endforeach()
  separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
  set(probe "${CMAKE_CURRENT_BINARY_DIR}/which_pybind11.cpp")
  file(WRITE "${probe}" "#include <pybind11/pybind11.h>\n")
  # CMake's own order: definitions, include folders, then CMAKE_CXX_FLAGS.
  execute_process(
    COMMAND "${CMAKE_CXX_COMPILER}" ${includes} ${flags} -std=c++20 -fPIC -M "${probe}"
    RESULT_VARIABLE status OUTPUT_VARIABLE dependencies ERROR_VARIABLE errors)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "The compiler does not find torch's pybind11 and Python.h:\n${errors}")
  endif()

  # A make rule: names are separated by blanks, line ends are escaped, blanks inside names are written "\ ".
  string(REPLACE "\\\n" " " dependencies "${dependencies}")
  string(REPLACE "\\ " "<blank>" dependencies "${dependencies}")
  string(REGEX MATCH "[^ \n]+/pybind11/pybind11\\.h" found "${dependencies}")
  string(REPLACE "<blank>" " " found "${found}")
  list(GET torch_include_dirs 0 torch_include)
  file(REAL_PATH "${found}" found)
  file(REAL_PATH "${torch_include}/pybind11/pybind11.h" wanted)
  if(NOT found STREQUAL wanted)
    message(FATAL_ERROR
      "Another pybind11 than torch's would be compiled in:\n"
      "  found   ${found}\n"
      "  wanted  ${wanted}\n"
      "Take its folder out of CPATH, CPLUS_INCLUDE_PATH and CXXFLAGS, then build again.")
  endif()
  message(STATUS "pybind11: ${found}")
endfunction()
