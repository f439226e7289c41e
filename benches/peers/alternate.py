#!/usr/bin/env python3
"""`anemoe bench` and llama.cpp's llama-bench in turn, on the same machine, one process at a time; medians.

    alternate.py --anemoe target/release/anemoe --bundle B.anemoe --llama-bench OUT/llama-bench --gguf F.gguf
                 [--rounds 3] [--context 64,4096] [--prefill 512] [--decode 32] [--fast] [--threads N]
                 [--max-busy 0.1 --wait 600] [--json OUT.json]

The first round tries llama.cpp with -fa 0 and 1, each with --repack 1 and 0; settings that reach --keep (0.85) of the best
in some figure run in the other rounds too, and each figure takes the setting with the best median. Every second round has
the two sides in the other order. Each process throws its first repetition away: ours does so itself, of llama-bench
the first of --repetitions + 1 samples is dropped. Files are read once before a process that maps them.
How busy the machine was with other things is measured before and during each process (Linux) and stands in the JSON; the
table marks figures whose runs were disturbed. GB/s counts weights only: for llama.cpp the bytes that make_gguf.py wrote
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
    """How busy the machine is when it has become quiet, or when the patience is over."""
    end = time.monotonic() + wait
    while True:
        now = busy()
        if now is None or now <= limit or time.monotonic() >= end:
            return now
        time.sleep(10)


def run(command, env=None):
    """(stdout, what the run was like). `others`: processors' worth of work that was not this process's, during it."""
    before, used, start = cpu_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    wall = time.monotonic() - start
    after, now = cpu_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    others = None
    if before is not None:
        own = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        others = round(max(0.0, after[0] - before[0] + after[1] - before[1] - own) / wall, 3)
    return done.stdout, {"wall_s": round(wall, 2), "others": others}


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

def ours(a, context):
    """{figure: tokens per second} and what else the bench says."""
    if not a.no_warm_files:
        read_once(a.bundle)
    state = {"busy_before": wait_until_quiet(a.max_busy, a.wait)}
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "bench.json")
        command = [a.anemoe, "bench", a.bundle, "--json", out, "--prefill", str(a.prefill), "--context", str(context),
                   "--decode", str(a.decode), "--repetitions", str(a.repetitions)]
        _, facts = run(command + (["--fast"] if a.fast else []))
        with open(out) as f:
            doc = json.load(f)
    if doc.get("schema") != 1:
        sys.exit(f"{a.anemoe} bench: schema {doc.get('schema')}, wanted 1")
    figures = {}
    for row in doc["prefill"]:
        if row["tokens"] == a.prefill:
            figures[f"prefill {a.prefill}"] = row["tok_s"]
    for row in doc["decode"]:
        if row["context"] == context:
            figures[f"decode at {context}"] = row["tok_s"]
    missing = {f"prefill {a.prefill}", f"decode at {context}"} - set(figures)
    if missing:
        sys.exit(f"{a.anemoe} bench: no {', '.join(sorted(missing))} in its JSON")
    return {"side": "anemoe", "figures": figures, "doc": doc, **state, **facts}


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
        if not repack and not a.no_warm_files:
            read_once(a.gguf)
        state = {"busy_before": wait_until_quiet(a.max_busy, a.wait)}
        text, facts = run([a.llama_bench, "-m", a.gguf, "-t", str(a.threads), "-fa", ",".join(map(str, fas)), "--repack",
                           str(repack), "-r", str(a.repetitions + 1), "-o", "json", *options])
        found = {fa: {} for fa in fas}
        for row in json.loads(text):
            model = {k: row.get(k) for k in ("build_commit", "build_number", "cpu_info", "model_type", "model_size",
                                             "model_n_params", "n_threads")}
            name = f"decode at {row['n_depth']}" if row["n_gen"] else f"prefill {row['n_prompt']}"
            found[int(row["flash_attn"])][name] = statistics.median(row["samples_ts"][1:])
        for fa in fas:
            runs.append({"side": "llama.cpp", "setting": label((fa, repack)), "figures": found[fa], "model": model,
                         **state, **facts})
    return runs


# ---- medians and tables

def summary(a, names, runs, finalists, bytes_per_token):
    docs = [r["doc"] for r in runs if r["side"] == "anemoe"]
    bandwidth = [d["machine"]["read_gb_s"] for d in docs if d.get("machine", {}).get("read_gb_s")]
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
    p.add_argument("--fast", action="store_true", help="our fast mode")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--keep", type=float, default=0.85)
    p.add_argument("--settings", help="of llama.cpp, as FA/REPACK,...: for instance 0/1,1/1; all four by default")
    p.add_argument("--max-busy", type=float, default=0.1, help="processors' worth of other work that is still quiet")
    p.add_argument("--wait", type=float, default=0, help="seconds to wait for quiet before each process")
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
                for context in a.context:
                    note(ours(a, context), round_)

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
    mode = "fast" if a.fast else "exact"
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
