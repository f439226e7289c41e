#!/usr/bin/env python3
"""Open and save the packages of bundles with coremltools, and ask anemoe whether they are still the same.

    reopen.py --anemoe target/release/anemoe [--golden F.npz] BUNDLE...

Opening (`load_spec`, `MLModel`) has to leave every byte as it was, and anemoe has to accept the bundle without a word. In a copy
of the bundle, coremltools writes every package anew; anemoe has to name each one as rewritten, with the same program and weights,
and to accept it. A copy with another program has to be refused. With a golden, `anemoe validate` judges both bundles as well.
Needs Python with coremltools==9.0. Exit status 0 when everything holds.
"""
import argparse, functools, json, multiprocessing, os, shutil, subprocess, sys, tempfile
import coremltools as ct

NAMED = "rewritten by another tool, same program and weights"


def files(folder):
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = file.read()
    return found


def packages(bundle):
    with open(os.path.join(bundle, "chain.json")) as file:
        return [os.path.join(bundle, shard["file"]) for shard in json.load(file)["shards"]]


def ask(anemoe, bundle, golden, cache):
    """Runs the commands that verify a bundle: the worst exit status, and the packages that were named."""
    commands = [[anemoe, "check", bundle]]
    if golden:
        commands.append([anemoe, "validate", bundle, "--golden", golden])
    worst, named, errors = 0, set(), ""
    for command in commands:
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": cache})
        # A gate may fail, as one of a model of random weights does: its file is no damage.
        worst = max(worst, run.returncode)
        named |= {line.split(": ")[0] for line in run.stderr.splitlines() if NAMED in line}
        errors += run.stderr
    return worst, named, errors


def check(anemoe, golden, bundle):
    with tempfile.TemporaryDirectory() as scratch:
        return bundle, *check_copy(bundle, anemoe, golden, scratch)


def check_copy(bundle, anemoe, golden, scratch):
    problems = []
    before, cache = files(bundle), os.path.join(scratch, "cache")
    for package in packages(bundle):
        ct.utils.load_spec(package)
        ct.models.MLModel(package, skip_model_load=True)
    after = files(bundle)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        problems.append(f"opening changed {', '.join(changed[:3])}")
    status, named, errors = ask(anemoe, bundle, golden, cache)
    if status > 1 or named:
        problems.append(f"opened: exit status {status}, {len(named)} packages named: {errors.strip()}")

    copy = os.path.join(scratch, os.path.basename(bundle.rstrip("/")))
    shutil.copytree(bundle, copy)
    rewritten, model = set(), os.path.join("Data", "com.apple.CoreML", "model.mlmodel")
    for package in packages(copy):
        old, weights = package + ".old.mlpackage", None
        os.rename(package, old)
        weights = os.path.join(old, "Data", "com.apple.CoreML", "weights")
        spec = ct.utils.load_spec(old)
        ct.utils.save_spec(spec, package, weights_dir=weights if os.path.isdir(weights) else None)
        if files(old) != files(package):
            rewritten.add(package)
        shutil.rmtree(old)
    if not rewritten:
        problems.append("coremltools saved every package byte for byte: nothing was tried")
    status, named, errors = ask(anemoe, copy, golden, cache)
    if status > 1 or not named <= rewritten or (rewritten - named) & moved(bundle, copy, rewritten):
        problems.append(
            f"saved: exit status {status}, {len(named)} of {len(rewritten)} packages named: {errors.strip()[-600:]}"
        )
    package = packages(copy)[0]
    spec = ct.utils.load_spec(package)
    function = next(iter(spec.mlProgram.functions.values()))
    block = next(iter(function.block_specializations.values()))
    block.operations[-1].attributes["name"].immediateValue.tensor.strings.values[0] += "_other"
    with open(os.path.join(package, model), "wb") as file:
        file.write(spec.SerializeToString())
    status, named, _ = ask(anemoe, copy, None, cache)
    if status != 2 or package in named:
        problems.append(f"another program: exit status {status}")
    return len(before), len(rewritten), problems


def moved(bundle, copy, rewritten):
    """Packages of which more than the manifest's identifiers has changed: these make no other size and count for no hash."""
    def differs(package):
        old, new = files(os.path.join(bundle, os.path.relpath(package, copy))), files(package)
        sizes = [sum(len(data) for data in side.values()) for side in (old, new)]
        return sizes[0] != sizes[1] or any(old.get(name) != new.get(name) for name in old if name != "Manifest.json")

    return {package for package in rewritten if differs(package)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anemoe", required=True, help="the binary")
    parser.add_argument("--golden", help="a golden of the bundles' model")
    parser.add_argument("bundles", nargs="+")
    arguments = parser.parse_args()
    failed = 0
    with multiprocessing.Pool() as pool:
        one = functools.partial(check, arguments.anemoe, arguments.golden)
        for bundle, count, rewritten, problems in pool.imap(one, arguments.bundles):
            failed += bool(problems)
            print(f"{'FAIL' if problems else 'ok  '} {bundle}: {count} files as they were, {rewritten} packages rewritten in a copy", flush=True)
            for problem in problems:
                print(f"     {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
