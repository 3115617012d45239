# Sourced by the other scripts.
#
# show_help "$@": where --help or -h is among the arguments, prints the comment at the head of the script and exits.
show_help() {
  local argument
  for argument in "$@"; do
    [[ $argument == --help || $argument == -h ]] || continue
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit 0
  done
}
