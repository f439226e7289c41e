# Sourced by test.sh and garage.sh, as `functions.sh ANEMOE`: a temporary folder, which goes with the server on exit, and what checks need.
set -euo pipefail
anemoe="$(realpath "$1")"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
model="$here/../../fixtures/tiny-zaya"
work="$(mktemp -d)"
server=
# Ends the server at once, so that it writes nothing more.
kill_server() {
  [ -z "$server" ] || { kill -KILL "$server" && wait "$server"; } 2>/dev/null || true
  server=
}
trap 'kill_server; rm -rf "$work"' EXIT
fail() { echo "FAILED: $*" >&2; exit 1; }
s3() { python3 "$here/client.py" "$@"; }
# Sockets that are open at the same time have different ports.
free_ports() { # COUNT
  python3 -c 'import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))' "$1"
}
wait_for() { # COMMAND...
  for _ in $(seq 100); do "$@" >/dev/null 2>&1 && return; sleep 0.2; done
  fail "the server does not start: $(tail -3 "$work/server.log")"
}
figure() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
refuse() { # TEXT COMMAND...
  local text="$1"; shift
  local said; said="$("$@" 2>&1 >/dev/null)" && fail "$* passed"
  grep -qF -- "$text" <<<"$said" || fail "$*: \`$text\` is not in: $said"
}
export AWS_ALLOW_HTTP=true no_proxy=127.0.0.1 NO_PROXY=127.0.0.1
unset AWS_SESSION_TOKEN AWS_ENDPOINT_URL_S3 AWS_SKIP_SIGNATURE
