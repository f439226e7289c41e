#!/bin/bash
# Runs build.sbatch and assemble.sbatch on a Slurm of one node that this script starts on loopback, with one task that fails and
# is run again, and compares the bundle with one that a single process built; then the same without a shared folder, through a
# store, with a task that is killed. Needs slurmctld, slurmd and munge (Debian:
# apt-get install slurm-wlm munge), root, and the binary: contrib/slurm/test.sh target/release/anemoe
set -euo pipefail
anemoe="$(realpath "$1")"
here="$(cd "$(dirname "$0")" && pwd)"
model="$here/../../fixtures/tiny-zaya"
work="$(mktemp -d)"
name="$(hostname -s)"
stop() {
  [ -f "$work/slurmd.pid" ] && kill "$(cat "$work/slurmd.pid")" 2>/dev/null || true
  [ -f "$work/slurmctld.pid" ] && kill "$(cat "$work/slurmctld.pid")" 2>/dev/null || true
  [ -f "$work/munged.pid" ] && kill "$(cat "$work/munged.pid")" 2>/dev/null || true
  # Daemons that are still ending write a last file.
  [ -n "${KEEP:-}" ] || for _ in $(seq 50); do rm -rf "$work" 2>/dev/null && break; sleep 0.1; done
}
trap stop EXIT
mkdir -p "$work"/{state,spool,munge}
chmod 711 "$work"
dd if=/dev/urandom of="$work/munge/key" bs=128 count=1 2>/dev/null
chown -R munge "$work/munge" && chmod 700 "$work/munge" && chmod 400 "$work/munge/key"
runuser -u munge -- munged --foreground --force --key-file "$work/munge/key" --socket "$work/munge/socket" \
  --pid-file "$work/munge/pid" --log-file "$work/munge/log" --seed-file "$work/munge/seed" &
echo $! >"$work/munged.pid"
chmod 711 "$work/munge"
cat >"$work/slurm.conf" <<EOF
ClusterName=test
SlurmctldHost=$name(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
SlurmctldPort=26817
SlurmdPort=26818
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
NodeName=$name NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$name Default=YES State=UP
EOF
export SLURM_CONF="$work/slurm.conf" ANEMOE="$anemoe"
for _ in $(seq 50); do [ -S "$work/munge/socket" ] && break; sleep 0.1; done
slurmctld -f "$work/slurm.conf"
slurmd -f "$work/slurm.conf"
for _ in $(seq 100); do sinfo -h -o %T 2>/dev/null | grep -q idle && break; sleep 0.2; done
sinfo
cd "$work"
"$anemoe" build "$model" -o whole --quant lut4 --tokens 1
submit=(sbatch --parsable --wait --mem=0 --cpus-per-task=1)
# Task 2 fails until it is mended.
cat >failing <<EOF
#!/bin/bash
[ "\${SLURM_ARRAY_TASK_ID:-}" = 2 ] && [ ! -f "$work/mended" ] && exit 7
exec "$anemoe" "\$@"
EOF
chmod +x failing
ANEMOE="$work/failing" "${submit[@]}" --array=0-3 "$here/build.sbatch" "$model" "$work/parts" --quant lut4 --tokens 1 && {
  echo "the failing task did not fail"; exit 1; }
"${submit[@]}" "$here/assemble.sbatch" "$work/parts" && { echo "an incomplete bundle was assembled"; exit 1; }
grep -h "are not built" anemoe-assemble.*.log
touch mended
ANEMOE="$work/failing" PARTS=4 "${submit[@]}" --export=ALL --array=2 "$here/build.sbatch" "$model" "$work/parts" --quant lut4 --tokens 1
"${submit[@]}" "$here/assemble.sbatch" "$work/parts"
diff -r -x journal.jsonl whole parts
echo "the bundle of the array job is byte-identical to that of one process"

# Without a shared folder. Task 1 is killed when it has sent its first shards; its disk goes with it.
export STORE="$work/store" TMPDIR="$work/local"
mkdir "$TMPDIR"
chmod 1777 "$TMPDIR"
cat >killed <<EOF
#!/bin/bash
"$anemoe" "\$@" &
if [ "\${SLURM_ARRAY_TASK_ID:-}" = 1 ] && [ ! -f "$work/tried" ]; then
  until [ -e "$STORE/bundles/whole.anemoe/part-1of3.json" ]; do sleep 0.01; done
  touch "$work/tried"
  kill -9 %1
fi
wait %1
EOF
chmod +x killed
options=(--quant lut4 --tokens 1)
ANEMOE="$work/killed" "${submit[@]}" --array=0-2 "$here/build.sbatch" "$model" whole.anemoe "${options[@]}" || true
[ -z "$(ls "$TMPDIR")" ] || { echo "a task left its folder: $(ls "$TMPDIR")"; exit 1; }
if "${submit[@]}" "$here/assemble.sbatch" "$work/whole.anemoe"; then
  echo "task 1 was done before it was killed"
else
  grep -h "not finished (1/3)" anemoe-assemble.*.log
  PARTS=3 "${submit[@]}" --array=1 "$here/build.sbatch" "$model" whole.anemoe "${options[@]}"
  grep -h "of this part were in" anemoe-build.*.log
  "${submit[@]}" "$here/assemble.sbatch" "$work/whole.anemoe"
fi
diff -r -x journal.jsonl whole whole.anemoe
"$anemoe" pull "$STORE" pulled --name whole.anemoe
diff -r whole.anemoe pulled
echo "the bundle of the array job through a store is byte-identical to that of one process"
