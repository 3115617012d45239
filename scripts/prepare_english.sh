#!/usr/bin/env bash
# Writes about 66 MB of English for runs larger than the quick start: one text, documents separated by blank lines.
#
#     scripts/prepare_english.sh OUT.txt
#     kestrel data build --split-documents blank-line ... OUT.txt
#
# From Debian's packages, which are unpacked and not installed (no root is needed):
#   dict-gcide       40.0 MB  Webster's dictionary of 1913 with WordNet's additions, an entry per document (GPL-2+)
#   bible-kjv         4.4 MB  the King James Bible, a chapter per document (public domain); where it is installed
#   python3.11-doc   11.0 MB  the Python manuals, a page per document (PSF licence)
#   perl-doc          8.8 MB  the Perl manuals, a page per document (Artistic licence or GPL)
#   git-doc           2.9 MB  the Git manuals, a page per document (GPL-2)
# On another release a package may be missing (Ubuntu 24.04 has python3.12-doc): it is named and left out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
show_help "$@"

if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: scripts/prepare_english.sh OUT.txt" >&2
  exit 2
fi
mkdir -p "$(dirname "$1")"
out=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work" "$out.tmp"' EXIT
cd "$work"

unpack() {
  local package
  for package in "$@"; do
    if apt-get download -qq "$package" 2>"$work/error" && dpkg-deb -x "${package}"_*.deb x; then
      echo "prepare_english: $package"
      return 0
    fi
  done
  echo "prepare_english: none of the packages $* could be had, going on without: $(tail -n 1 "$work/error")" >&2
}
# A file per document: its own blank lines go, one follows it.
pages() {
  local page
  while IFS= read -r -d '' page; do
    grep -v '^[[:space:]]*$' "$page" || true
    echo
  done
}

unpack dict-gcide
unpack python3.11-doc python3.12-doc python3.13-doc
unpack perl-doc
unpack git-doc
mkdir -p x
{
  [[ -e x/usr/share/dictd/gcide.dict.dz ]] && zcat x/usr/share/dictd/gcide.dict.dz
  echo
  if command -v bible >/dev/null; then
    "$root/scripts/prepare_kjv.sh" kjv.txt && cat kjv.txt
    echo
  fi
  find x -name '*.rst.txt' -print0 | LC_ALL=C sort -z | pages
  find x -name '*.pod' -print0 | LC_ALL=C sort -z | pages
  find x/usr/share/doc -path '*git*' -name '*.txt' ! -name '*.rst.txt' -print0 2>/dev/null | LC_ALL=C sort -z | pages
} >"$out.tmp"
bytes=$(wc -c <"$out.tmp")
if [[ $bytes -lt 1000000 ]]; then
  echo "prepare_english: only $bytes bytes could be had; check the network and apt-get's sources" >&2
  exit 3
fi
mv "$out.tmp" "$out"
echo "prepare_english: $bytes bytes, sha256 $(sha256sum <"$out" | cut -c1-64) in $out"
