#!/bin/sh
# Says in one message what this machine lacks to build hpcomm; shell, because Python may be what is missing.
# Reads PYTHON and CXX from the environment.
set -u

python=${PYTHON:-python3}
lacks=
debian=
fedora=
note=

# lack <what> <Debian and Ubuntu packages> <Fedora packages>
lack() {
  lacks="$lacks
  - $1"
  debian="$debian $2"
  fedora="$fedora $3"
}

can() {
  "$python" -c "$1" > /dev/null 2>&1
}

# Packages are named after the interpreter that was asked for: python3-dev, python3.12-dev.
name=$(basename "$python")
case $name in
  python3 | python3.*) ;;
  *) name=python3 ;;
esac

[ "$(uname -s)" = Linux ] || note="hpcomm runs on Linux only; this is $(uname -s)."

if ! command -v "$python" > /dev/null 2>&1 || ! can ''; then
  lack "Python: '$python' does not run" "$name $name-dev $name-venv" "$name $name-devel"
elif ! can 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  lack "Python 3.10 or newer: '$python' is $("$python" -V 2>&1)" \
    "python3.12 python3.12-dev python3.12-venv" "python3.12 python3.12-devel"
  note="Name the newer Python: make PYTHON=python3.12 ..."
else
  # Debian splits both from the interpreter; its venv module is there but cannot install pip without ensurepip.
  can 'import venv, ensurepip' || lack "Python's venv module with pip" "$name-venv" "$name"
  can 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' ||
    lack "the header files of Python (Python.h)" "$name-dev" "$name-devel"
fi

# The order in which CMake looks.
compiler=${CXX:-}
if [ -z "$compiler" ]; then
  for candidate in c++ g++ clang++; do
    if command -v "$candidate" > /dev/null 2>&1; then
      compiler=$candidate
      break
    fi
  done
fi
# CXX may carry words of its own ("ccache g++"): unquoted on purpose.
if [ -z "$compiler" ]; then
  lack "a C++ compiler" "g++" "gcc-c++"
elif ! command -v ${compiler%% *} > /dev/null 2>&1; then
  lack "a C++ compiler: CXX is '$compiler', which does not exist" "g++" "gcc-c++"
elif ! printf '#include <concepts>\n#include <span>\n' |
  $compiler -std=c++20 -x c++ -fsyntax-only - > /dev/null 2>&1; then
  lack "a C++20 compiler (GCC 11 or clang 14 and newer): '$compiler' cannot compile <concepts> and <span>" \
    "g++" "gcc-c++"
fi

[ -n "$lacks$note" ] || exit 0
{
  [ -z "$lacks" ] || printf 'hpcomm cannot be built on this machine yet. It lacks:%s\n\n' "$lacks"
  [ -z "$debian" ] || printf '  Debian, Ubuntu:  sudo apt install%s\n' "$debian"
  [ -z "$fedora" ] || printf '  Fedora:          sudo dnf install%s\n' "$fedora"
  [ -z "$note" ] || printf '%s\n' "$note"
} >&2
exit 1
