# Pushes, pulls, interrupts and damages bundles in the empty bucket `models` of an S3 server, and compares what comes back.
# Sourced by test.sh and garage.sh, after functions.sh, when the server runs and the AWS_* variables name it.
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
python3 - large.anemoe/tokenizer.json <<'EOF'
import random, sys
random.seed(7)
with open(sys.argv[1], "w") as f:
    f.write("{}")
    for _ in range(120):
        f.write("".join(random.choices(" \t\n", k=1 << 20)))
EOF
kills=0
for delay in $(seq 0.1 0.05 6); do
  # Quoted: where it is not killed it ends with 0.
  if timeout -s KILL "$delay" "$anemoe" push large.anemoe $store --jobs 1 >/dev/null 2>&1; then break; fi
  kills=$((kills + 1))
  if [ "$(s3 uploads models | awk '{n += $1} END {print n + 0}')" -ge 3 ]; then break; fi
done
there="$(s3 uploads models)"
echo "killed $kills times; parts there: $there"
[ "$(awk '{n += $1} END {print n + 0}' <<<"$there")" -ge 3 ] || fail "no upload was interrupted between two parts"
sent="$("$anemoe" push large.anemoe $store --json | figure bytes_sent)"
whole="$(stat -c %s large.anemoe/tokenizer.json)"
echo "sent $sent bytes more of $whole"
# The last part that is there may have been cut off, or its id not noted.
[ "$sent" -le $((whole - 2 * 16 * 1024 * 1024)) ] || fail "the parts that were there were sent again"
# A push that is killed before it notes the id of an upload leaves one without parts.
[ "$(s3 uploads models | awk '{n += $1} END {print n + 0}')" = 0 ] || fail "an upload was left: $(s3 uploads models)"

echo "-- a pull that is killed, and goes on"
kills=0
for delay in $(seq 0.1 0.05 4); do
  if timeout -s KILL "$delay" "$anemoe" pull $store large-back.anemoe --name large.anemoe >/dev/null 2>&1; then break; fi
  kills=$((kills + 1))
  [ -e large-back.anemoe ] || continue
  # Killed between the rename and the end of the process: what has the name is whole.
  diff -r large.anemoe large-back.anemoe || fail "a bundle that is not whole has its name"
  break
done
[ -e large-back.anemoe ] || "$anemoe" pull $store large-back.anemoe --name large.anemoe
echo "killed $kills times"
[ "$kills" -gt 0 ] || fail "no pull was interrupted"
diff -r large.anemoe large-back.anemoe

echo "-- two pushes of the same files at once"
for round in 1 2 3 4; do
  pids=()
  for i in 1 2; do "$anemoe" push large.anemoe "s3://models/twice-$round" >"twice-$i.log" 2>&1 & pids+=($!); done
  for pid in "${pids[@]}"; do wait "$pid" || fail "a push beside another: $(tail -qn 1 twice-?.log)"; done
done
"$anemoe" pull s3://models/twice-4 twice.anemoe --name large.anemoe
diff -r large.anemoe twice.anemoe
rm -r twice.anemoe

echo "-- damage"
read -r _ key < <(s3 keys models | grep anemoe/objects/ | sort -rn | sed -n 2p)
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
