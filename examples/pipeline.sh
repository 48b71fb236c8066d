#!/usr/bin/env bash
# Classify files as they arrive in a folder, and tell about the doubtful ones.
#
#   bash examples/pipeline.sh INBOX RUN [OPTIONS OF remtta adapt ...]
#
# Needs inotifywait (inotify-tools) and jq. Its exit code is that of remtta adapt. Each start has a folder of its own in RUN;
# add --delta RUN/.../delta.safetensors to go on with the weights of an earlier one.
#
# Ctrl-C ends it after a clean save. Files that then wait for a batch of 8 to be full are not predicted, and the next start is not
# told of them: end inotifywait alone (kill) to have them predicted first, or choose --batch-size 1.
set -eu

inbox=${1:?name the folder to watch}
run=${2:?name the folder for the results}
shift 2

set +e # every part of the pipeline has a code, looked at below
inotifywait --monitor --quiet --event close_write --event moved_to --format '%w%f' "$inbox" |
    remtta adapt - --output "$run/$(date -u +%Y%m%dT%H%M%SZ)" --predictions - --quiet --batch-size 8 "$@" |
    jq --unbuffered -r 'select(.error or .prob < 0.5)
        | "\(.source): \(.error // "\(.label // .class) at \(.prob * 100 | floor) %, doubtful")"
        | gsub("[[:cntrl:]]"; "?")' # a file's name must not control the terminal
codes=("${PIPESTATUS[@]}")

if [ "${codes[1]}" != 0 ]; then exit "${codes[1]}"; fi
if [ "${codes[2]}" = 141 ]; then exit 0; fi # whoever reads this script's output has seen enough
exit "${codes[2]}"
