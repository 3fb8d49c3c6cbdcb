#!/bin/sh
# Runs nvcc and keeps what ptxas says about each kernel: ptxas_log.sh <folder> <compiler> <arguments>...
# Its lines go to <folder>/<name of the object>.log; warnings, errors and everything else to the screen.
set -u

folder=$1
shift
object=
previous=
for word; do
  [ "$previous" != -o ] || object=$word
  previous=$word
done
[ -n "$object" ] || exec "$@"

mkdir -p "$folder"
log=$folder/$(basename "$object" .o).log
# ptxas continues its lines with "ptxas info" or four blanks.
"$@" 2> "$log.new"
status=$?
grep -v -e '^ptxas info' -e '^    [0-9]* bytes stack frame' "$log.new" >&2
mv "$log.new" "$log"
exit $status
