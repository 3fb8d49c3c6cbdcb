# Decides whether the native tests run the CUDA half, over a runtime of host threads. It needs CUDA's headers, nothing else.
#
# hpcomm_decide_fake_cuda(): HPCOMM_FAKE_CUDA=AUTO becomes ON or OFF in the caller's scope; HPCOMM_CUDA_INCLUDE_DIR is the
# folder of cuda_runtime_api.h.
function(hpcomm_decide_fake_cuda)
  set(possible OFF)
  if(HPCOMM_BUILD_TESTS AND NOT HPCOMM_TORCH_INCLUDE_DIRS AND NOT HPCOMM_USE_CUDA)
    set(possible ON)
  endif()
  if(NOT HPCOMM_FAKE_CUDA STREQUAL "AUTO")
    if(HPCOMM_FAKE_CUDA AND NOT possible)
      message(FATAL_ERROR "HPCOMM_FAKE_CUDA is for native tests without torch and without HPCOMM_USE_CUDA.")
    endif()
    set(possible "${HPCOMM_FAKE_CUDA}")
  endif()

  set(HPCOMM_FAKE_CUDA OFF PARENT_SCOPE)
  if(NOT possible)
    return()
  endif()
  find_path(HPCOMM_CUDA_INCLUDE_DIR cuda_runtime_api.h
    HINTS "$ENV{CUDA_HOME}/include" "$ENV{CUDA_HOME}/targets/x86_64-linux/include"
          /usr/local/cuda/include /usr/local/cuda/targets/x86_64-linux/include
    DOC "Folder of cuda_runtime_api.h")
  if(HPCOMM_CUDA_INCLUDE_DIR)
    message(STATUS "CUDA half in the native tests: over host threads, headers from ${HPCOMM_CUDA_INCLUDE_DIR}")
    set(HPCOMM_FAKE_CUDA ON PARENT_SCOPE)
  elseif(HPCOMM_FAKE_CUDA STREQUAL "AUTO")
    message(WARNING
      "The native tests of the CUDA half are left out: no cuda_runtime_api.h. They need CUDA's headers, not a GPU: "
      "set CUDA_HOME or -DHPCOMM_CUDA_INCLUDE_DIR=... (-DHPCOMM_FAKE_CUDA=OFF silences this).")
  else()
    message(FATAL_ERROR "HPCOMM_FAKE_CUDA needs cuda_runtime_api.h: set CUDA_HOME or -DHPCOMM_CUDA_INCLUDE_DIR=...")
  endif()
endfunction()
