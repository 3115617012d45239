# cuDNN for attention (included after the room kernel_attention exists): KESTREL_CUDNN = AUTO, ON or OFF.  Needs two sets
# of headers, cuDNN's own and its frontend's; the library itself is loaded at run time, so the program starts without it.
if(NOT HAVE_CUDA)
  return()
endif()
set(KESTREL_CUDNN AUTO CACHE STRING "cuDNN attention: AUTO, ON or OFF")
set(KESTREL_CUDNN_FRONTEND "" CACHE PATH "Folder that holds cudnn_frontend.h, or whose include folder does")
file(GLOB KESTREL_VENV_INCLUDES ${CMAKE_SOURCE_DIR}/build/venv*/lib/python3*/site-packages/include)
find_path(CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
  HINTS ${KESTREL_CUDNN_FRONTEND} ${KESTREL_CUDNN_FRONTEND}/include ${KESTREL_VENV_INCLUDES})
find_path(CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} $ENV{CUDNN_PATH}/include)
set(CUDNN_FOUND OFF)
if(CUDNN_FRONTEND_INCLUDE AND CUDNN_INCLUDE)
  set(CUDNN_FOUND ON)
endif()
kestrel_optional(CUDNN ${CUDNN_FOUND} "It needs cudnn.h (NVIDIA's package libcudnn9-dev-cuda-13) and cudnn_frontend.h: python3 -m venv build/venv && build/venv/bin/pip install nvidia-cudnn-frontend, or set KESTREL_CUDNN_FRONTEND. Without it the own attention kernels serve.")
if(HAVE_CUDNN)
  target_compile_definitions(kernel_attention PRIVATE KESTREL_HAVE_CUDNN)
  target_link_libraries(kernel_attention PRIVATE ${CMAKE_DL_LIBS})
  # One file includes the frontend; at -O1 it compiles in a third of the time, and only starts work.
  set_source_files_properties(${CMAKE_SOURCE_DIR}/kernels/attention/attention_cudnn.cpp PROPERTIES
    COMPILE_DEFINITIONS "NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING;CUDNN_FRONTEND_SKIP_JSON_LIB"
    COMPILE_OPTIONS "-O1;-isystem;${CUDNN_FRONTEND_INCLUDE};-isystem;${CUDNN_INCLUDE}")
endif()
