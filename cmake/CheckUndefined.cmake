# Fails the build when the module lacks a function of ours: `cmake -DNM=<nm> -DMODULE=<file> -P CheckUndefined.cmake`.
#
# -Wl,--no-undefined cannot say it: an extension module finds Python's functions in the interpreter, at run time. What
# torch lacks shows at the first import, which binds everything at once.
execute_process(
  COMMAND "${NM}" --dynamic --undefined-only --demangle "${MODULE}"
  RESULT_VARIABLE status OUTPUT_VARIABLE symbols ERROR_VARIABLE errors)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${NM} cannot read ${MODULE}:\n${errors}")
endif()
string(REGEX MATCHALL "[^\n]*hpcomm::[^\n]*" missing "${symbols}")
if(missing)
  list(JOIN missing "\n" missing)
  file(REMOVE "${MODULE}")
  message(FATAL_ERROR "Declared and used, but in no source file of CMakeLists.txt:\n${missing}")
endif()
