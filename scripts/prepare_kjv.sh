#!/usr/bin/env bash
# Writes the King James Bible as plain text, one chapter per document: the verses of a chapter are consecutive lines,
# chapters are separated by a blank line, and the verse references ("Ge1:1 ") are dropped.
#
#     scripts/prepare_kjv.sh OUT.txt
#     kestrel data build --split-documents blank-line ... OUT.txt
#
# The text comes from the program `bible` (Debian and Ubuntu: apt-get install bible-kjv; 4.4 MB, public domain).  Where
# it is not installed, the first 70 chapters (Genesis and half of Exodus, 276 kB, made by this very script) are copied
# from tests/fixtures/text/kjv_excerpt.txt; that is enough to try everything, too little for a figure.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
show_help "$@"

readonly verses=31102
readonly sha256=cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d # of bible-kjv 4.38's output

if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: scripts/prepare_kjv.sh OUT.txt" >&2
  exit 2
fi
out=$1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$(dirname "$out")"

if ! command -v bible >/dev/null; then
  cp "$root/tests/fixtures/text/kjv_excerpt.txt" "$out"
  echo "prepare_kjv: \`bible\` is not installed (apt-get install bible-kjv); wrote the excerpt of 70 chapters" \
    "($(wc -c <"$out") bytes) to $out instead of the whole text." >&2
  exit 0
fi

raw=$(mktemp "$out.raw.XXXXXX")
trap 'rm -f "$raw" "$out.tmp"' EXIT
bible -f 'Gen1:1-Rev22:21' </dev/null >"$raw"
found=$(wc -l <"$raw")
if [[ $found -ne $verses ]]; then
  echo "prepare_kjv: \`bible\` printed $found verses, expected $verses; its text is incomplete." \
    "Reinstall bible-kjv." >&2
  exit 3
fi
if [[ $(sha256sum <"$raw") != "$sha256  -" ]]; then
  echo "prepare_kjv: warning: this edition of the text is not the one of bible-kjv 4.38, so measured losses will" \
    "differ a little from the figures in the README." >&2
fi
# "Ge1:1 In the beginning": the chapter is what stands before the colon of the first field.
awk '{
  chapter = substr($1, 1, index($1, ":") - 1)
  if (NR > 1 && chapter != last) print ""
  last = chapter
  sub(/^[^ ]+ /, "")
  print
}' "$raw" >"$out.tmp"
mv "$out.tmp" "$out"
echo "prepare_kjv: wrote $(awk 'BEGIN { RS = "" } END { print NR }' "$out") chapters, $(wc -c <"$out") bytes, to $out"
