# Sourced by the other scripts: what Kestrel needs from the system, and how to get it.
#
# Debian 12 / Ubuntu 24.04 package names.  The build needs the first group; OpenBLAS and MPI are optional parts the tests cover;
# bible-kjv is the quick start's text.
kestrel_build_packages=(g++ cmake ninja-build nlohmann-json3-dev libspdlog-dev libcli11-dev zlib1g-dev)
kestrel_optional_packages=(libopenblas-dev libopenmpi-dev openmpi-bin)
kestrel_text_packages=(bible-kjv gzip)
kestrel_test_packages=(libgtest-dev python3 python3-venv ccache)

# Installs those of the given packages that are missing.  Without root and without sudo it names them and fails.
install_packages() {
  local missing=() p
  for p in "$@"; do
    dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$p")
  done
  [[ ${#missing[@]} -eq 0 ]] && return 0
  local as_root=()
  if [[ $(id -u) -ne 0 ]]; then
    if ! command -v sudo >/dev/null; then
      echo "missing packages: ${missing[*]}. Install them as root: apt-get install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  echo "installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
