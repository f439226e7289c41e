#!/usr/bin/env python3
"""`anemoe bench` and llama.cpp's llama-bench in turn, on the same machine, one process at a time; medians.

    alternate.py --anemoe target/release/anemoe --bundle B.anemoe --llama-bench OUT/llama-bench --gguf F.gguf
                 [--rounds 3] [--context 64,4096] [--prefill 512] [--decode 32] [--exact] [--threads N]
                 [--max-busy 0.1 --wait 600 --retries 3] [--json OUT.json]

The first round tries llama.cpp with -fa 0 and 1, each with --repack 1 and 0; settings that reach --keep (0.85) of the best
in some figure run in the other rounds too, and each figure takes the setting with the best median. Every second round has
the two sides in the other order. Each process throws its first repetition away: ours does so itself, of llama-bench
the first of --repetitions + 1 samples is dropped. Files are read once before a process that maps them.
How busy the machine was with other things is measured before and during each process (Linux) and stands in the JSON; with
--wait and --retries a process waits for quiet, and is ended and run again when it was disturbed; the table marks figures
some of whose runs were disturbed. GB/s counts weights only: for llama.cpp the bytes that make_gguf.py wrote
beside the GGUF, for us what our bench says.
Needs Python 3.10 and nothing else.
"""
import argparse, json, os, platform, resource, statistics, subprocess, sys, tempfile, time


# ---- the machine

def cpu_seconds():
    """Seconds that all processors together worked, and that were stolen from them; None where that is not to be had."""
    try:
        with open("/proc/stat") as f:
            t = [int(x) for x in f.readline().split()[1:]]
    except OSError:
        return None
    hz = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = t[:8]
    return (user + nice + system + irq + softirq) / hz, steal / hz


def busy(seconds=1.0):
    """Processors' worth of work of others, and of stolen time."""
    a = cpu_seconds()
    if a is None:
        return None
    start = time.monotonic()
    time.sleep(seconds)
    b, wall = cpu_seconds(), time.monotonic() - start
    return round((b[0] - a[0] + b[1] - a[1]) / wall, 3)


def wait_until_quiet(limit, wait):
    """How busy the machine is when it has become quiet, or when the patience is over. Where there is something to wait for,
    quiet is ten seconds long: a compiler's pause is none."""
    end = time.monotonic() + wait
    while True:
        now = busy()
        if now is not None and now <= limit and wait > 0:
            now = busy(10.0)
        if now is None or now <= limit or time.monotonic() >= end:
            return now
        time.sleep(5)


def used_by(pid):
    """Seconds of processor time of a running process; None when it is gone or there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            t = f.read().rpartition(")")[2].split()
        return (int(t[11]) + int(t[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None


def once(command, give_up):
    """(stdout or None, what the run was like). `others`: processors' worth of work that was not this process's, and of
    stolen time, while it ran. With `give_up`, a process beside which others take half a processor for six seconds is ended."""
    before, used, start = cpu_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            child = subprocess.Popen(command, stdout=out, stderr=err)
        except OSError as e:
            sys.exit(f"{command[0]}: {e.strerror}")
        last, loud = (time.monotonic(), cpu_seconds(), used_by(child.pid)), 0
        ended = False
        try:
            while child.poll() is None:
                try:
                    child.wait(timeout=2)
                except subprocess.TimeoutExpired:
                    now = (time.monotonic(), cpu_seconds(), used_by(child.pid))
                    if give_up and None not in (*last, *now):
                        total = sum(now[1]) - sum(last[1]) - (now[2] - last[2])
                        loud = loud + 1 if total / (now[0] - last[0]) > 0.5 else 0
                        if loud == 3:
                            child.kill()
                            ended = True
                    last = now
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        wall = time.monotonic() - start
        after, now = cpu_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
        out.seek(0)
        err.seek(0)
        text, errors = out.read(), err.read()
    if child.returncode != 0 and not ended:
        sys.exit(f"{' '.join(command)}\nexit status {child.returncode}\n{text[-2000:]}\n{errors[-4000:]}")
    others = None
    if before is not None:
        own = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        others = round(max(0.0, sum(after) - sum(before) - own) / wall, 3)
    return None if ended else text, {"wall_s": round(wall, 2), "others": others}


def run(a, command, files=None):
    """Runs it when the machine is quiet, and again, --retries times at most, when others disturbed it."""
    for retries_left in range(a.retries, -1, -1):
        if files and not a.no_warm_files:
            read_once(files)
        busy_before = wait_until_quiet(a.max_busy, a.wait)
        text, facts = once(command, retries_left > 0)
        quiet = facts["others"] is None or facts["others"] <= a.max_busy
        if quiet and text is not None or retries_left == 0:
            return text, {"busy_before": busy_before, **facts}
        print(f"others took {facts['others']} processors during {facts['wall_s']} s: again", file=sys.stderr, flush=True)


def files_below(path):
    if os.path.isfile(path):
        return [path]
    return sorted(os.path.join(d, name) for d, _, names in os.walk(path) for name in names)


def read_once(path):
    """So that its pages are in memory, as far as there is room."""
    piece = bytearray(1 << 22)
    for name in files_below(path):
        with open(name, "rb", buffering=0) as f:
            while f.readinto(piece):
                pass


# ---- the two sides

def ours(a, names):
    """One process for all figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "bench.json")
        command = [a.anemoe, "bench", a.bundle, "--no-journal", "--save", out, "--prefill", str(a.prefill),
                   "--context", ",".join(map(str, a.context)), "--decode", str(a.decode), "--repetitions", str(a.repetitions)]
        _, facts = run(a, command + (["--exact"] if a.exact else []), a.bundle)
        with open(out) as f:
            doc = json.load(f)
    if doc.get("schema") != 1:
        sys.exit(f"{a.anemoe} bench: schema {doc.get('schema')}, wanted 1")
    figures = {f"prefill {row['tokens']}": row["tok_s"] for row in doc["prefill"]}
    figures |= {f"decode at {row['context']}": row["tok_s"] for row in doc["decode"]}
    missing = set(names) - set(figures)
    if missing:
        sys.exit(f"{a.anemoe} bench: no {', '.join(sorted(missing))} in its JSON")
    return {"side": "anemoe", "figures": figures, "doc": doc, **facts}


SETTINGS = [(fa, repack) for repack in (1, 0) for fa in (0, 1)]


def label(setting):
    return f"-fa {setting[0]} --repack {setting[1]}"


def llama(a, figures, settings):
    """The figures in all settings: one process for each --repack, which loads the model once. A list of runs."""
    depths = [int(f.split()[-1]) for f in figures if f.startswith("decode")]
    # llama-bench combines every option with every other, so prompts and decoding at depths are processes of their own.
    options = ["-p", "0", "-n", str(a.decode), "-d", ",".join(map(str, depths))] if depths else ["-p", str(a.prefill), "-n", "0"]
    runs = []
    for repack in sorted({r for _, r in settings}, reverse=True):
        fas = [fa for fa, r in settings if r == repack]
        # Repacking reads the file while it loads.
        text, facts = run(a, [a.llama_bench, "-m", a.gguf, "-t", str(a.threads), "-fa", ",".join(map(str, fas)), "--repack",
                           str(repack), "-r", str(a.repetitions + 1), "-o", "json", *options],
                          None if repack else a.gguf)
        found = {fa: {} for fa in fas}
        for row in json.loads(text):
            model = {k: row.get(k) for k in ("build_commit", "build_number", "cpu_info", "model_type", "model_size",
                                             "model_n_params", "n_threads")}
            name = f"decode at {row['n_depth']}" if row["n_gen"] else f"prefill {row['n_prompt']}"
            found[int(row["flash_attn"])][name] = statistics.median(row["samples_ts"][1:])
        for fa in fas:
            runs.append({"side": "llama.cpp", "setting": label((fa, repack)), "figures": found[fa], "model": model, **facts})
    return runs


# ---- medians and tables

def summary(a, names, runs, finalists, bytes_per_token):
    docs = [r["doc"] for r in runs if r["side"] == "anemoe"]
    measured = [d.get("machine", {}).get(key) for d in docs for key in ("read_gb_s", "read_gb_s_after")]
    bandwidth = [b for b in measured if b]
    bandwidth = statistics.median(bandwidth) if bandwidth else None
    rows = []
    for name in names:
        mine = [r["figures"][name] for r in runs if r["side"] == "anemoe" and name in r["figures"]]
        by_setting = {}
        for r in runs:
            if r["side"] == "llama.cpp" and name in r["figures"]:
                by_setting.setdefault(r["setting"], []).append(r["figures"][name])
        # Only settings that ran in every round have a median worth the name.
        complete = {k: v for k, v in by_setting.items() if k in map(label, finalists.get(name, []))}
        best = max(complete, key=lambda k: statistics.median(complete[k])) if complete else None
        row = {"figure": name, "anemoe_tok_s": statistics.median(mine) if mine else None, "anemoe_all": mine,
               "llama_tok_s": statistics.median(complete[best]) if best else None, "llama_setting": best,
               "llama_all": by_setting}
        row["ratio"] = row["anemoe_tok_s"] / row["llama_tok_s"] if mine and best else None
        if name.startswith("decode"):
            context = int(name.split()[-1])
            gb = [d["gb_per_token"] for doc in docs for d in doc["decode"]
                  if d["context"] == context and d.get("gb_per_token")]
            for side, per_token in (("anemoe", gb[0] if gb else None),
                                    ("llama", bytes_per_token / 1e9 if bytes_per_token else None)):
                speed = row[f"{side}_tok_s"]
                row[f"{side}_gb_per_token"] = per_token
                row[f"{side}_gb_s"] = per_token * speed if per_token and speed else None
                if bandwidth and row[f"{side}_gb_s"]:
                    row[f"{side}_share_of_bandwidth"] = row[f"{side}_gb_s"] / bandwidth
        chosen = [r for r in runs if name in r["figures"] and (r["side"] == "anemoe" or r["setting"] == best)]
        row["others_max"] = max((r["others"] for r in chosen if r["others"] is not None), default=None)
        row["disturbed"] = row["others_max"] is not None and row["others_max"] > a.max_busy
        rows.append(row)
    return rows, bandwidth


def table(rows):
    number = lambda x, digits=2: "" if x is None else f"{x:.{digits}f}"

    def rate(row, side):
        if row.get(f"{side}_gb_s") is None:
            return ""
        share = row.get(f"{side}_share_of_bandwidth")
        return f"{row[f'{side}_gb_s']:.1f}" + (f" ({share:.0%})" if share else "")

    spread = lambda values: f"{min(values):.2f}-{max(values):.2f}" if len(values) > 1 else ""
    lines = ["| | anemoe tok/s | range | GB/s | llama.cpp tok/s | range | GB/s | its setting | times as fast |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        theirs = row["llama_all"].get(row["llama_setting"], [])
        name = row["figure"] + (" (disturbed)" if row["disturbed"] else "")
        lines.append(f"| {name} | {number(row['anemoe_tok_s'])} | {spread(row['anemoe_all'])} | {rate(row, 'anemoe')} | "
                     f"{number(row['llama_tok_s'])} | {spread(theirs)} | {rate(row, 'llama')} | {row['llama_setting'] or ''} | "
                     f"{number(row['ratio'])} |")
    return "\n".join(lines)


def settings_table(rows):
    names = sorted({s for row in rows for s in row["llama_all"]})
    lines = ["| llama.cpp, medians | " + " | ".join(row["figure"] for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for s in names:
        cells = [row["llama_all"].get(s, []) for row in rows]
        lines.append(f"| {s} | " + " | ".join(f"{statistics.median(c):.2f} ({len(c)})" if c else "" for c in cells) + " |")
    return "\n".join(lines)


def gguf_bytes(path):
    try:
        with open(os.path.splitext(path)[0] + ".json") as f:
            return json.load(f)["bytes_per_token"]
    except (OSError, KeyError, ValueError):
        return None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--anemoe")
    p.add_argument("--bundle")
    p.add_argument("--llama-bench")
    p.add_argument("--gguf")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--context", default="64", help="contexts to decode at, separated by commas")
    p.add_argument("--prefill", type=int, default=512)
    p.add_argument("--decode", type=int, default=32)
    p.add_argument("--repetitions", type=int, default=1, help="timed repetitions in each process")
    p.add_argument("--exact", action="store_true", help="exact products")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--keep", type=float, default=0.85)
    p.add_argument("--settings", help="of llama.cpp, as FA/REPACK,...: for instance 0/1,1/1; all four by default")
    p.add_argument("--max-busy", type=float, default=0.1, help="processors' worth of other work that is still quiet")
    p.add_argument("--wait", type=float, default=0, help="seconds to wait for quiet before each process")
    p.add_argument("--retries", type=int, default=0, help="of a process that others disturbed")
    p.add_argument("--bytes-per-token", type=int, help="of the GGUF, where no file of make_gguf.py lies beside it")
    p.add_argument("--no-warm-files", action="store_true")
    p.add_argument("--json", help="file for all runs and medians")
    a = p.parse_args()
    a.context = [int(c) for c in a.context.split(",")]
    if a.anemoe and not a.bundle or a.llama_bench and not a.gguf or not (a.anemoe or a.llama_bench):
        p.error("--anemoe with --bundle, --llama-bench with --gguf, or both")
    settings = SETTINGS
    if a.settings:
        settings = [tuple(int(x) for x in s.split("/")) for s in a.settings.split(",")]
    bytes_per_token = a.bytes_per_token or (gguf_bytes(a.gguf) if a.gguf else None)
    names = [f"decode at {c}" for c in a.context] + [f"prefill {a.prefill}"]
    finalists = {f: settings for f in names}
    runs = []

    def note(r, round_):
        r["round"] = round_
        runs.append(r)
        shown = "  ".join(f"{k} {v:.2f}" for k, v in sorted(r["figures"].items()))
        print(f"round {round_ + 1}  {r['side']} {r.get('setting', '')}  {shown}  others {r['others']}", file=sys.stderr, flush=True)

    for round_ in range(a.rounds):
        def side_a():
            if a.anemoe:
                note(ours(a, names), round_)

        def side_b():
            # One group for the prompt, one for decoding at all depths.
            for group in (names[:-1], names[-1:]) if a.llama_bench else ():
                wanted = [s for s in SETTINGS if any(s in finalists[f] for f in group)]
                for r in llama(a, group, wanted):
                    note(r, round_)

        for side in (side_a, side_b) if round_ % 2 == 0 else (side_b, side_a):
            side()
        if round_ == 0 and a.llama_bench:
            for f in names:
                first = {s: r["figures"][f] for s in finalists[f] for r in runs if r.get("setting") == label(s) and f in r["figures"]}
                finalists[f] = [s for s in first if first[s] >= a.keep * max(first.values())]

    rows, bandwidth = summary(a, names, runs, finalists, bytes_per_token)
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "threads": a.threads, "read_gb_s": bandwidth,
               "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None}
    for r in runs:
        if r["side"] == "anemoe" and r["doc"].get("machine"):
            machine["cpu"] = r["doc"]["machine"].get("cpu")
        elif r["side"] == "llama.cpp":
            machine.setdefault("cpu", r["model"].get("cpu_info"))
    mode = "exact" if a.exact else "default"
    print(f"{machine.get('cpu')}, {a.threads} threads, {a.rounds} rounds, anemoe {mode}"
          + (f", reads {bandwidth:.1f} GB/s" if bandwidth else "") + "\n")
    print(table(rows))
    if a.llama_bench:
        print("\n" + settings_table(rows))
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"schema": 1, "mode": mode, "machine": machine, "figures": rows, "runs": runs}, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
