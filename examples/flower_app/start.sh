#!/usr/bin/env bash
# Start a SuperLink with TLS and SuperNode authentication, and three SuperNodes, each with its own CSV file and key.
set -euo pipefail
cd "$(dirname "$0")"
source ./environment.sh

flower-superlink --host 127.0.0.1 --port "$PORT" --database "$WORK/superlink.db" \
    --ssl-ca-certfile "$WORK/keys/ca.crt" --ssl-certfile "$WORK/keys/server.pem" --ssl-keyfile "$WORK/keys/server.key" \
    --enable-supernode-auth --disable-runtime-dependency-installation \
    > "$WORK/superlink.log" 2>&1 &
echo $! > "$WORK/superlink.pid"

make_identities "$WORK/sites"

# Only registered keys may connect, and the name given here is the client's id.
for site in $SITES; do
    for attempt in $(seq 60); do
        flwr supernode register "$WORK/keys/$site.pub" loopback --name "$site" && break
        [ "$attempt" -lt 60 ] && sleep 1
    done
done
port="$PORT"
for site in $SITES; do
    start_site "$site" "$((++port))"
done
echo "SuperLink on 127.0.0.1:$PORT and the SuperNodes of $SITES are starting; logs are in $WORK"
