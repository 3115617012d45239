# The CUDA back end: sets HAVE_CUDA, and when it is on enables the language and makes `kestrel_cuda`, the libraries of
# every room with device code.  Nothing here needs a GPU or a driver, neither to build nor to start the program.
set(CUDA_FOUND OFF)
if(NOT KESTREL_CUDA STREQUAL "OFF")
  find_program(KESTREL_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin PATHS /usr/local/cuda/bin)
  if(KESTREL_NVCC)
    # The list is fixed rather than "native", which fails on a machine without a GPU.
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES ${KESTREL_CUDA_ARCHS})
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
      if(NOT DEFINED ENV{CUDACXX})
        set(ENV{CUDACXX} ${KESTREL_NVCC})
      endif()
      include(CheckLanguage)
      check_language(CUDA)
    endif()
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      find_package(CUDAToolkit QUIET)
      if(TARGET CUDA::cudart_static AND TARGET CUDA::cublas AND TARGET CUDA::cublasLt
         AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.4)
        set(CUDA_FOUND ON)
      endif()
    endif()
  endif()
endif()
kestrel_optional(CUDA ${CUDA_FOUND} "It needs nvcc 12.4 or newer and cuBLAS: install the CUDA toolkit from developer.nvidia.com/cuda-downloads and put its bin folder on PATH, or set CUDA_HOME.")

if(NOT HAVE_CUDA)
  target_compile_definitions(kestrel_flags INTERFACE KESTREL_BUILT_WITH_CUDA=0)
  return()
endif()
target_compile_definitions(kestrel_flags INTERFACE KESTREL_BUILT_WITH_CUDA=1)

# CMake 3.25 does not know how this nvcc spells C++20 and would fall back to C++17.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
# Where cuBLAS and cuDNN are found at run time without LD_LIBRARY_PATH.
list(APPEND CMAKE_BUILD_RPATH ${CUDAToolkit_LIBRARY_DIR})
list(APPEND CMAKE_INSTALL_RPATH ${CUDAToolkit_LIBRARY_DIR})

# --expt-relaxed-constexpr: constexpr functions of the host headers (size_of, std::bit_cast) may be used in kernels.
target_compile_options(kestrel_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wno-unknown-pragmas>)
if(KESTREL_WERROR)
  target_compile_options(kestrel_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Werror>)
endif()

add_library(kestrel_cuda INTERFACE)
target_link_libraries(kestrel_cuda INTERFACE CUDA::cudart_static CUDA::cublas CUDA::cublasLt)
