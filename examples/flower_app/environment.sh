# Sourced by the other scripts: where everything of this example lives, and Flower without look-ups on the network.
# That is outside of the app's folder, which Flower packs and sends to the sites.
export PORT="${PORT:-18000}"
export SITES="${SITES:-north south west}"
export WORK="${WORK:-$HOME/fedppl-clinics}"
export WARM="${WARM:-900}"  # seconds that a clinic's worker waits for the next message; 0 has none
export FLWR_HOME="$WORK/flower"
export FLWR_TELEMETRY_ENABLED=0
export FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export OMP_NUM_THREADS=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1  # seconds; how often Flower looks for a message to start a process for
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0  # Ray's workers step back behind everything else on the machine by default
mkdir -p "$WORK" "$FLWR_HOME"

# The connections that `flwr ... loopback` and `flwr ... simulation` use.
cat > "$FLWR_HOME/config.toml" <<CONFIG
[superlink]
default = "loopback"

[superlink.loopback]
address = "127.0.0.1:$PORT"
root-certificates = "$WORK/keys/ca.crt"

[superlink.simulation]
address = "127.0.0.1:$((PORT + 4))"
insecure = true
CONFIG

make_identities() { # make_identities FOLDER: what each clinic does at home, sending its line to the others by letter
    local site other
    mkdir -p "$1"
    for site in $SITES; do
        [ -f "$1/$site/identity" ] || python -m fedppl.site identity "$1/$site" > "$1/$site.line" || return
    done
    for site in $SITES; do
        for other in $SITES; do
            [ "$other" = "$site" ] || grep -qs "^$other " "$1/$site/roster" ||
                python -m fedppl.site roster "$1/$site" "$(cat "$1/$other.line")" || return
        done
    done
}

start_site() { # start_site NAME PORT
    flower-supernode --superlink "127.0.0.1:$PORT" --port "$2" \
        --root-certificates "$WORK/keys/ca.crt" --auth-supernode-private-key "$WORK/keys/$1" \
        --node-config "data=\"$WORK/data/$1.csv\" policy=\"$WORK/policies/$1.toml\" folder=\"$WORK/sites/$1\" warm=$WARM" \
        > "$WORK/$1.log" 2>&1 &
    echo $! > "$WORK/$1.pid"
}

start_simulation() { # a SuperLink that runs everything on this machine, on loopback, without sites
    make_identities "$WORK/simulated" || return
    flower-superlink --insecure --simulation --host 127.0.0.1 --port "$((PORT + 4))" \
        --disable-runtime-dependency-installation > "$WORK/simulation.log" 2>&1 &
    echo $! > "$WORK/simulation.pid"
    until (exec 3<> "/dev/tcp/127.0.0.1/$((PORT + 4))") 2>&-; do
        kill -0 "$(cat "$WORK/simulation.pid")" || return 1
        sleep 0.5
    done
}
