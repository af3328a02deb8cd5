#!/usr/bin/env bash
# Fetch and start a Pulsar broker of one process, to try `topics: pulsar://…` and to run its tests:
#     deploy/pulsar_standalone.sh start && PULSAR_URL=pulsar://127.0.0.1:6650 pytest tests/unit/flow/test_pulsar.py
# With Docker it runs the published image, otherwise the release (about 300 MB; needs Java 17 or later).
set -euo pipefail

version=${PULSAR_VERSION:-4.0.4}
folder=${PULSAR_FOLDER:-${XDG_CACHE_HOME:-$HOME/.cache}/worldmodel/pulsar}
mirror=${PULSAR_MIRROR:-https://archive.apache.org/dist/pulsar}
name=apache-pulsar-$version
container=worldmodel-pulsar

start() {
    if docker info >/dev/null 2>&1; then
        docker run --detach --rm --name "$container" --publish 127.0.0.1:6650:6650 --publish 127.0.0.1:8080:8080 \
            "apachepulsar/pulsar:$version" bin/pulsar standalone --no-functions-worker --no-stream-storage
    else
        fetch
        cd "$folder/$name"
        PULSAR_MEM=${PULSAR_MEM:--Xms512m -Xmx1g -XX:MaxDirectMemorySize=1g} nohup bin/pulsar standalone \
            --no-functions-worker --no-stream-storage --advertised-address 127.0.0.1 >standalone.log 2>&1 &
        echo $! >"$folder/pid"
    fi
    for _ in $(seq 90); do
        if curl --fail --silent http://127.0.0.1:8080/admin/v2/brokers/health >/dev/null; then
            echo "PULSAR_URL=pulsar://127.0.0.1:6650"
            return
        fi
        sleep 1
    done
    echo "The broker has not answered for 90 s; see $folder/$name/standalone.log or 'docker logs $container'." >&2
    exit 1
}

fetch() {
    [ -x "$folder/$name/bin/pulsar" ] && return
    command -v java >/dev/null || { echo "Install Java 17 or later, or Docker." >&2; exit 1; }
    mkdir -p "$folder"
    cd "$folder"
    curl --fail --location --remote-name "$mirror/pulsar-$version/$name-bin.tar.gz"
    curl --fail --location --remote-name "$mirror/pulsar-$version/$name-bin.tar.gz.sha512"
    sha512sum --check "$name-bin.tar.gz.sha512"
    tar -xzf "$name-bin.tar.gz"
    rm "$name-bin.tar.gz"
}

stop() {
    if [ -f "$folder/pid" ]; then
        kill "$(cat "$folder/pid")"
        rm "$folder/pid"
    else
        docker stop "$container"
    fi
}

case ${1:-} in
    start | stop) "$1" ;;
    *) echo "usage: $0 start|stop" >&2; exit 2 ;;
esac
