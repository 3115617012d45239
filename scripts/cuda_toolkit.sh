# Sourced by the other scripts: a CUDA toolkit to compile with.
#
# find_nvcc [FOLDER...]: puts an nvcc on PATH, from CUDA_HOME, /usr/local/cuda or the folders; fails when there is none.
#
# find_cuda_toolkit VENV PREFIX: uses the nvcc that is there (PATH, CUDA_HOME, /usr/local/cuda); otherwise assembles CUDA 13.0 from
# NVIDIA's wheels on PyPI into PREFIX and puts it on PATH.  No GPU and no driver are needed to compile.
find_nvcc() {
  local folder
  for folder in "${CUDA_HOME:-}/bin" /usr/local/cuda/bin "$@"; do
    if [[ -x $folder/nvcc ]]; then
      export PATH=$folder:$PATH
      break
    fi
  done
  command -v nvcc >/dev/null
}

find_cuda_toolkit() {
  local venv=$1 prefix=$2 folder
  find_nvcc "$prefix/bin" && return 0
  echo "no nvcc: assembling CUDA 13.0 from PyPI in $prefix"
  "$venv/bin/pip" install --quiet 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
    'nvidia-cuda-cccl==13.0.*' 'nvidia-cublas==13.*' 'nvidia-cuda-nvrtc==13.0.*' 'nvidia-cudnn-cu13==9.*' || return 1
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia
  mkdir -p "$prefix"
  for folder in "$site"/cu13 "$site"/cudnn; do
    [[ -d $folder ]] && cp -rsf "$(cd "$folder" && pwd)"/. "$prefix"/
  done
  [[ -e $prefix/lib64 ]] || ln -s lib "$prefix/lib64"
  # The linker looks for the names without a version.
  local library name
  for library in "$prefix"/lib/lib*.so.*; do
    name=${library%%.so.*}.so
    [[ -e $name ]] || ln -s "$(basename "$library")" "$name"
  done
  export PATH=$PWD/$prefix/bin:$PATH CUDA_HOME=$PWD/$prefix
  command -v nvcc >/dev/null
}
