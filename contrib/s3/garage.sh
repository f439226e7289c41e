#!/bin/bash
# Runs checks.sh with Garage 2 (https://garagehq.deuxfleurs.fr), an S3 server with signatures, regions and a disk, on loopback, and then
# checks what a mock cannot show. It takes Python 3, and `garage` from the PATH or the file that GARAGE names.
#   contrib/s3/garage.sh target/release/anemoe
set -euo pipefail
garage="$(command -v "${GARAGE:-garage}")" || { echo "garage is not installed; GARAGE=FILE names it" >&2; exit 2; }
garage="$(realpath "$garage")"
. "$(dirname "$0")/functions.sh" "$1"

read -r s3_port rpc_port < <(free_ports 2)
cat >"$work/garage.toml" <<END
metadata_dir = "$work/meta"
data_dir = "$work/data"
db_engine = "sqlite"
replication_factor = 1
rpc_bind_addr = "127.0.0.1:$rpc_port"
rpc_public_addr = "127.0.0.1:$rpc_port"
rpc_secret = "$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')"
[s3_api]
api_bind_addr = "127.0.0.1:$s3_port"
s3_region = "garage"
END
# Garage reads no secret that others may read.
chmod 600 "$work/garage.toml"
admin() { "$garage" -c "$work/garage.toml" "$@" 2>>"$work/admin.log"; }
start_server() {
  RUST_LOG=garage=warn "$garage" -c "$work/garage.toml" server >>"$work/server.log" 2>&1 &
  server=$!
  wait_for admin status
}
start_server
node="$(admin node id -q)"
admin layout assign "${node%%@*}" -z here -c 10GB >/dev/null
admin layout apply --version 1 >/dev/null
key="$(admin key create check)"
admin bucket create models >/dev/null
admin bucket allow models --read --write --key check >/dev/null
AWS_ACCESS_KEY_ID="$(sed -n 's/^Key ID: *//p' <<<"$key")"
AWS_SECRET_ACCESS_KEY="$(sed -n 's/^Secret key: *//p' <<<"$key")"
export AWS_ENDPOINT_URL="http://127.0.0.1:$s3_port" AWS_REGION=garage AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY
wait_for s3 keys models
. "$here/checks.sh"

echo "-- keys and regions"
refuse "Invalid signature" env AWS_SECRET_ACCESS_KEY=other "$anemoe" push small.anemoe s3://models/keys
refuse "Invalid signature" env AWS_SECRET_ACCESS_KEY=other "$anemoe" pull $store x.anemoe
refuse "No such key" env AWS_ACCESS_KEY_ID=other "$anemoe" pull $store x.anemoe
refuse "set AWS_ACCESS_KEY_ID" env -u AWS_ACCESS_KEY_ID -u AWS_SECRET_ACCESS_KEY "$anemoe" pull $store x.anemoe
refuse "set AWS_REGION=garage" env AWS_REGION=us-east-1 "$anemoe" push small.anemoe s3://models/keys
admin bucket create foreign >/dev/null
refuse "Operation is not allowed for this key" "$anemoe" push small.anemoe s3://foreign/x
# A key that may only read: the reason of the refusal, and not that the connection broke while the body was sent.
admin key create reader >"$work/reader.txt"
admin bucket allow models --read --key reader >/dev/null
reader() {
  env AWS_ACCESS_KEY_ID="$(sed -n 's/^Key ID: *//p' "$work/reader.txt")" \
    AWS_SECRET_ACCESS_KEY="$(sed -n 's/^Secret key: *//p' "$work/reader.txt")" "$@"
}
refuse "Operation is not allowed for this key" reader "$anemoe" push large.anemoe s3://models/keys
# A wrong secret is noticed before anything is built.
refuse "Invalid signature" env AWS_SECRET_ACCESS_KEY=other \
  "$anemoe" build --skip-gates "$model" -o unbuilt.anemoe --push s3://models/keys
[ ! -e unbuilt.anemoe ] || fail "a build began with a wrong secret"
[ -z "$(s3 keys models | grep keys/)" ] || fail "a refused push left objects"

echo "-- a server that is killed during a push and a pull"
wait_for_part() { # its push has sent a part
  for _ in $(seq 100); do [ -z "$(s3 uploads models | grep -v '^0 ')" ] || return 0; sleep 0.05; done
  fail "no part was sent"
}
"$anemoe" push large.anemoe s3://models/killed --jobs 1 >push.log 2>&1 & pid=$!
wait_for_part
kill_server
status=0; wait "$pid" || status=$?
[ "$status" = 2 ] || fail "a push to a dead server ended with $status: $(tail -1 push.log)"
grep -qF "the same command goes on" push.log || fail "it does not say how to go on: $(tail -1 push.log)"
start_server
"$anemoe" push large.anemoe s3://models/killed --jobs 1 >push.log 2>&1 & pid=$!
wait_for_part
kill_server
start_server
wait "$pid" || fail "a push does not live through a restart of the server: $(tail -1 push.log)"
"$anemoe" pull s3://models/killed killed.anemoe --name large.anemoe >pull.log 2>&1 & pid=$!
sleep 0.1
kill_server
start_server
wait "$pid" || fail "a pull does not live through a restart of the server: $(tail -1 pull.log)"
diff -r large.anemoe killed.anemoe

echo "-- a damaged disk of the server"
# The largest ones are of the largest file, which is in the bucket twice: Garage keeps equal blocks once.
read -r _ block < <(find "$work/data" -type f -printf '%s %p\n' | sort -rn)
python3 - "$block" <<'END'
import os, sys
with open(sys.argv[1], "r+b") as f:
    middle = os.path.getsize(sys.argv[1]) // 2
    f.seek(middle); byte = f.read(1)[0]
    f.seek(middle); f.write(bytes([byte ^ 1]))
END
rm -rf killed.anemoe
refuse "models/killed" "$anemoe" pull s3://models/killed killed.anemoe --name large.anemoe
[ ! -e killed.anemoe ] || fail "a damaged bundle has its name"
"$anemoe" push large.anemoe s3://models/killed --verify
"$anemoe" pull s3://models/killed killed.anemoe --name large.anemoe
diff -r large.anemoe killed.anemoe
echo "anemoe and Garage agree"
