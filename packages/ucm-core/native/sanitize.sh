#!/usr/bin/env bash
# Builds the stress binary under each sanitizer and runs it. Usage: sanitize.sh FOLDER_FOR_BINARIES [SECONDS_PER_RUN]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?folder for binaries}
seconds=${2:-5}
mkdir -p "$out"

build() { # build NAME FLAGS...
  local name=$1
  shift
  "${CXX:-c++}" -std=c++17 -O1 -g -Wall -Wextra -Werror -fno-omit-frame-pointer "$@" "$here/stress.cc" -o "$out/$name" -pthread
}

build stress-asan -fsanitize=address & asan=$!
build stress-ubsan -fsanitize=undefined -fno-sanitize-recover=all & ubsan=$!
build stress-tsan -fsanitize=thread & tsan=$!
# One by one: only so does each of them have to succeed.
wait $asan
wait $ubsan
wait $tsan

"$out/stress-asan" threads "$seconds"
"$out/stress-asan" processes "$seconds"
"$out/stress-asan" files 2
"$out/stress-ubsan" threads "$seconds"
# TSan cannot map its shadow where the kernel spreads addresses widely: run it without randomisation.
export TSAN_OPTIONS=halt_on_error=1
setarch -R "$out/stress-tsan" threads "$seconds"
setarch -R "$out/stress-tsan" files 2
