#!/bin/sh
# Classify files as they arrive in a folder, and tell about the doubtful ones.
#
#   sh examples/pipeline.sh INBOX RUN [OPTIONS OF remtta adapt ...]
#
# Needs inotifywait (inotify-tools) and jq. Ctrl-C ends it after a clean save. Each start has a folder of its own in RUN;
# add --delta RUN/.../delta.safetensors to go on with the weights of an earlier one.
set -eu

inbox=${1:?name the folder to watch}
run=${2:?name the folder for the results}
shift 2

inotifywait --monitor --quiet --event close_write --event moved_to --format '%w%f' "$inbox" |
    remtta adapt - --output "$run/$(date -u +%Y%m%dT%H%M%SZ)" --predictions - --quiet --batch-size 8 "$@" |
    jq --unbuffered -r 'select(.error or .prob < 0.5)
        | "\(.source): \(.error // "\(.label // .class) at \(.prob * 100 | floor) %, doubtful")"'
