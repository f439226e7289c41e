#!/bin/bash
# Pushes, pulls, interrupts and damages bundles in a real S3 server on loopback (moto, from PyPI), and compares what comes back.
#   python3 -m venv VENV && VENV/bin/pip install 'moto[server]==5.2.5'
#   contrib/s3/test.sh target/release/anemoe VENV/bin
set -euo pipefail
anemoe="$(realpath "$1")"
bin="$(realpath "$2")"
here="$(cd "$(dirname "$0")" && pwd)"
model="$here/../../fixtures/tiny-zaya"
work="$(mktemp -d)"
server=
stop() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  rm -rf "$work"
}
trap stop EXIT
fail() { echo "FAILED: $*" >&2; exit 1; }
ask() { "$bin/python" - "$@"; }

port="$(ask <<'EOF'
import socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])
EOF
)"
"$bin/moto_server" -H 127.0.0.1 -p "$port" >"$work/server.log" 2>&1 &
server=$!
export AWS_ENDPOINT_URL="http://127.0.0.1:$port" AWS_ALLOW_HTTP=true AWS_REGION=us-east-1
export AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test no_proxy=127.0.0.1 NO_PROXY=127.0.0.1
unset AWS_SESSION_TOKEN AWS_ENDPOINT_URL_S3 AWS_SKIP_SIGNATURE
cat >"$work/s3.py" <<'EOF'
import sys, boto3
s3 = boto3.client("s3")
what, *args = sys.argv[1:]
if what == "bucket":
    s3.create_bucket(Bucket=args[0])
elif what == "keys":
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=args[0])
    print(*(f'{o["Size"]} {o["Key"]}' for page in pages for o in page.get("Contents", [])), sep="\n")
elif what == "uploads":
    for upload in s3.list_multipart_uploads(Bucket=args[0]).get("Uploads", []):
        parts = s3.list_parts(Bucket=args[0], Key=upload["Key"], UploadId=upload["UploadId"]).get("Parts", [])
        print(len(parts), upload["Key"])
elif what == "damage":
    body = bytearray(s3.get_object(Bucket=args[0], Key=args[1])["Body"].read())
    body[len(body) // 2] ^= 1
    s3.put_object(Bucket=args[0], Key=args[1], Body=bytes(body))
elif what == "cut":
    body = s3.get_object(Bucket=args[0], Key=args[1])["Body"].read()
    s3.put_object(Bucket=args[0], Key=args[1], Body=body[:-1])
EOF
s3() { "$bin/python" "$work/s3.py" "$@"; }
for _ in $(seq 100); do s3 bucket models 2>/dev/null && break; sleep 0.2; done
s3 keys models >/dev/null || fail "the server does not start: $(tail -3 "$work/server.log")"
figure() { "$bin/python" -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
refuse() { # TEXT COMMAND...
  local text="$1"; shift
  local said; said="$("$@" 2>&1 >/dev/null)" && fail "$* passed"
  grep -qF -- "$text" <<<"$said" || fail "$*: \`$text\` is not in: $said"
}

cd "$work"
"$anemoe" build "$model" -o small.anemoe --quant lut4 --tokens 1 --skip-gates
store=s3://models/anemoe

echo "-- a bundle there and back"
"$anemoe" push small.anemoe $store
[ "$("$anemoe" push small.anemoe $store --json | figure bytes_sent)" = 0 ] || fail "it was sent twice"
"$anemoe" pull $store back.anemoe --name small.anemoe
diff -r small.anemoe back.anemoe
"$anemoe" check back.anemoe >/dev/null || true
# Another bundle that shares its shards.
cp -r small.anemoe other.anemoe
echo '{}' >other.anemoe/generation_config.json
[ "$("$anemoe" push other.anemoe $store --json | figure files_sent)" = 1 ] || fail "shared objects were sent again"

echo "-- an upload in parts that is killed, and goes on"
cp -r small.anemoe large.anemoe
# Spaces are JSON, and no part of it is like another one.
ask large.anemoe/tokenizer.json <<'EOF'
import random, sys
random.seed(7)
with open(sys.argv[1], "w") as f:
    f.write("{}")
    for _ in range(120):
        f.write("".join(random.choices(" \t\n", k=1 << 20)))
EOF
kills=0
for delay in $(seq 0.2 0.1 6); do
  # Quoted: where it is not killed it ends with 0.
  if timeout -s KILL "$delay" "$anemoe" push large.anemoe $store --jobs 1 >/dev/null 2>&1; then break; fi
  kills=$((kills + 1))
  if [ "$(s3 uploads models | awk '{n += $1} END {print n + 0}')" -ge 2 ]; then break; fi
done
there="$(s3 uploads models)"
echo "killed $kills times; parts there: $there"
[ "$(awk '{n += $1} END {print n + 0}' <<<"$there")" -ge 2 ] || fail "no upload was interrupted between two parts"
sent="$("$anemoe" push large.anemoe $store --json | figure bytes_sent)"
whole="$(stat -c %s large.anemoe/tokenizer.json)"
echo "sent $sent bytes more of $whole"
[ "$sent" -lt $((whole - 30000000)) ] || fail "the parts that were there were sent again"
[ -z "$(s3 uploads models)" ] || fail "an upload was left: $(s3 uploads models)"

echo "-- a pull that is killed, and goes on"
kills=0
for delay in $(seq 0.1 0.05 4); do
  if timeout -s KILL "$delay" "$anemoe" pull $store large-back.anemoe --name large.anemoe >/dev/null 2>&1; then break; fi
  kills=$((kills + 1))
  [ ! -e large-back.anemoe ] || fail "a bundle that is not whole has its name"
done
[ -e large-back.anemoe ] || "$anemoe" pull $store large-back.anemoe --name large.anemoe
echo "killed $kills times"
[ "$kills" -gt 0 ] || fail "no pull was interrupted"
diff -r large.anemoe large-back.anemoe

echo "-- damage"
read -r _ key < <(s3 keys models | grep objects/ | sort -rn | sed -n 2p)
s3 damage models "$key"
refuse "its hash is" "$anemoe" pull $store damaged.anemoe --name small.anemoe
[ ! -e damaged.anemoe ] || fail "a damaged bundle has its name"
[ "$("$anemoe" push small.anemoe $store --verify --json | figure files_sent)" = 1 ] || fail "damage was not mended"
s3 cut models "$key"
refuse "bytes, not" "$anemoe" pull $store damaged.anemoe --name small.anemoe
[ "$("$anemoe" push small.anemoe $store --json | figure files_sent)" = 1 ] || fail "a short object was not mended"
"$anemoe" pull $store damaged.anemoe --name small.anemoe
diff -r small.anemoe damaged.anemoe

echo "-- refusals"
refuse "there is no bucket" "$anemoe" push small.anemoe s3://nowhere/x
refuse "there is no bucket" "$anemoe" pull s3://nowhere/x x.anemoe
refuse "there is no bundle \`x.anemoe\`" "$anemoe" pull $store x.anemoe
refuse "AWS_ALLOW_HTTP" env -u AWS_ALLOW_HTTP "$anemoe" pull $store x.anemoe

echo "-- three parts, one of them killed without its disk"
"$anemoe" build "$model" -o whole --quant lut4 --tokens 1
part() { "$anemoe" build "$model" -o "machine-$1/part" --quant lut4 --tokens 1 --shard "$1/3" --push $store --name parts --jobs 1; }
for delay in $(seq 0.1 0.05 3); do
  if timeout -s KILL "$delay" "$anemoe" build "$model" -o machine-1/part --quant lut4 --tokens 1 --shard 1/3 --push $store \
    --name parts --jobs 1 >/dev/null 2>&1; then break; fi
  if s3 keys models | grep -q bundles/parts/; then break; fi
done
rm -rf machine-1
refuse "parts are not there or not finished" "$anemoe" assemble joined --pull $store --name parts
pids=()
for i in 0 1 2; do part "$i" >"part-$i.log" 2>&1 & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || { cat part-*.log; fail "a part"; }; done
grep -h "of this part were in" part-1.log
"$anemoe" assemble joined --pull $store --name parts
diff -r -x journal.jsonl whole joined
"$anemoe" push joined $store --name parts
"$anemoe" pull $store parts
diff -r joined parts
echo "the bundle of three parts in an S3 server is byte-identical to that of one process"
