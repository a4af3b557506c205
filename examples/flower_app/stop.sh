#!/usr/bin/env bash
# Stop the SuperNodes with their warm workers, the SuperLink, and that of a simulation.
cd "$(dirname "$0")"
source ./environment.sh
for name in $SITES superlink simulation; do
    [ -f "$WORK/$name.pid" ] && kill "$(cat "$WORK/$name.pid")" 2>/dev/null
    rm -f "$WORK/$name.pid"
done
rm -f "$WORK"/sites/*/worker/key  # a warm worker ends when its key is gone
echo "stopped"
