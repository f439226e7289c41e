//! Commands that a trial runs, and the inputs that they read.

use super::process;
use super::snapshot::copy;
use crate::files::tiny::{self, as_f32, gguf_of};
use crate::seeds;
use crate::task::root;
use anemoe_npz::{Array, write_npy};
use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A command with valid inputs. Paths are relative to the scratch folder; `in/` has copies of the inputs.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Name of the sub-command.
    pub command: &'static str,
    /// Names of the inputs in the pool.
    pub inputs: &'static [&'static str],
    /// Arguments after the sub-command, separated by blanks.
    pub args: &'static str,
    /// Output that the command may create or change.
    pub output: Option<&'static str>,
    /// Options that take numbers or names, to which hostile values are given.
    pub options: &'static [&'static str],
}

const fn case(
    command: &'static str,
    inputs: &'static [&'static str],
    args: &'static str,
    output: Option<&'static str>,
    options: &'static [&'static str],
) -> Case {
    Case { command, inputs, args, output, options }
}

const PLAN: &[&str] = &[
    "--quant",
    "--group-size",
    "--block-size",
    "--experts-per-shard",
    "--ffn-shards",
    "--tokens",
    "--token-range",
    "--max-context",
    "--max-shard-mb",
    "--min-cosine",
    "--max-bytes",
    "--importance",
    "--threads",
];
const BUILD: &[&str] = &[
    "--quant",
    "--group-size",
    "--block-size",
    "--experts-per-shard",
    "--tokens",
    "--max-context",
    "--max-shard-mb",
    "--jobs",
    "--max-memory",
    "--shard",
    "--probes",
    "--scratch",
    "--golden",
    "--importance",
];
const GENERATE: &[&str] = &[
    "--prompt-ids",
    "--prompt",
    "--max-new",
    "--temperature",
    "--top-k",
    "--top-p",
    "--seed",
    "--prefill-chunk",
];
const G: &str = "in/gemma.anemoe";

/// All cases of trials.
pub const CASES: &[Case] = &[
    case("inspect", &["gemma"], "in/gemma --tensors", None, &[]),
    case("inspect", &["sharded"], "in/sharded", None, &[]),
    case("inspect", &["zaya"], "in/zaya", None, &[]),
    case("inspect", &["tiny.gguf"], "in/tiny.gguf --tensors", None, &[]),
    case("inspect", &["gemma.anemoe"], "in/gemma.anemoe", None, &[]),
    case("inspect", &["functions_s.mlpackage"], "in/functions_s.mlpackage --text", None, &[]),
    case("inspect", &["lut4_g32.mlpackage"], "in/lut4_g32.mlpackage --text", None, &[]),
    case("plan", &["gemma"], "in/gemma --tokens 1,4 --out out/plan.json", Some("out/plan.json"), PLAN),
    case("plan", &["sharded"], "in/sharded --quant int8-tensor", None, PLAN),
    case("plan", &["zaya"], "in/zaya --all", None, PLAN),
    case("plan", &["tiny.gguf"], "in/tiny.gguf", None, PLAN),
    case("plan", &["gemma", "importance.npz"], "in/gemma --importance in/importance.npz", None, PLAN),
    case(
        "build",
        &["gemma"],
        "in/gemma -o out/b.anemoe --skip-gates --tokens 1 --quant fp16",
        Some("out/b.anemoe"),
        BUILD,
    ),
    case(
        "build",
        &["zaya"],
        "in/zaya -o out/b.anemoe --skip-gates --tokens 1 --quant int8-channel",
        Some("out/b.anemoe"),
        BUILD,
    ),
    case(
        "build",
        &["tiny.gguf"],
        "in/tiny.gguf -o out/b.anemoe --skip-gates --tokens 1 --quant fp16",
        Some("out/b.anemoe"),
        BUILD,
    ),
    case(
        "build",
        &["gemma", "importance.npz"],
        "in/gemma -o out/b.anemoe --skip-gates --tokens 1 --quant int8-channel --importance in/importance.npz",
        Some("out/b.anemoe"),
        BUILD,
    ),
    case(
        "check",
        &["gemma.anemoe"],
        "in/gemma.anemoe",
        Some("in/gemma.anemoe/journal.jsonl"),
        &["--target", "--units", "--chip"],
    ),
    case(
        "check",
        &["functions_s.mlpackage"],
        "in/functions_s.mlpackage --ops",
        None,
        &["--target", "--units", "--chip"],
    ),
    case("check", &["kv_state_s.mlpackage"], "in/kv_state_s.mlpackage --ops", None, &["--chip"]),
    case(
        "check",
        &["functions_s.mlpackage", "report.json"],
        "in/functions_s.mlpackage --report in/report.json",
        None,
        &[],
    ),
    case("check", &["known.tsv"], "--outcomes in/known.tsv", None, &[]),
    case(
        "golden",
        &["gemma"],
        "in/gemma --prompt-ids 2,5,7 --decode 2 -o out/g.npz",
        Some("out/g.npz"),
        &["--decode", "--prompt-ids", "--prompt"],
    ),
    case(
        "golden",
        &["zaya"],
        "in/zaya --prompt-ids 2,5,7 --decode 2 -o out/g.npz",
        Some("out/g.npz"),
        &["--decode", "--prompt-ids"],
    ),
    case(
        "golden",
        &["tiny.gguf"],
        "in/tiny.gguf --prompt-ids 2,5 --decode 1 -o out/g.npz",
        Some("out/g.npz"),
        &["--decode"],
    ),
    case(
        "validate",
        &["gemma.anemoe", "golden.npz"],
        "in/gemma.anemoe --golden in/golden.npz",
        Some("in/gemma.anemoe/journal.jsonl"),
        &["--min-cosine", "--probes", "--shards"],
    ),
    case(
        "validate",
        &["zaya.anemoe", "golden-zaya.npz"],
        "in/zaya.anemoe --golden in/golden-zaya.npz",
        Some("in/zaya.anemoe/journal.jsonl"),
        &["--min-cosine"],
    ),
    case("generate", &["gemma.anemoe"], "in/gemma.anemoe --prompt-ids 2,3 --max-new 3", None, GENERATE),
    case("generate", &["gemma.anemoe"], "in/gemma.anemoe --prompt Once --max-new 3", None, GENERATE),
    case("generate", &["zaya.anemoe"], "in/zaya.anemoe --prompt-ids 2,3 --max-new 3", None, GENERATE),
    case(
        "bench",
        &["gemma.anemoe"],
        "in/gemma.anemoe --prefill 4 --context 4 --decode 2 --repetitions 1 --save out/s.json",
        Some("out"),
        &["--prefill", "--context", "--decode", "--prefill-chunk"],
    ),
    case(
        "quantize",
        &["gemma"],
        "in/gemma/model.safetensors:model.embed_tokens.weight --quant int8-channel -o out/q.mlpackage",
        Some("out/q.mlpackage"),
        &["--quant", "--group-size", "--block-size", "--op", "--target"],
    ),
    case(
        "quantize",
        &["a.npy"],
        "in/a.npy --quant lut4 -o out/q.mlpackage",
        Some("out/q.mlpackage"),
        &["--quant", "--group-size", "--block-size", "--importance"],
    ),
    case(
        "quantize",
        &["a.npy"],
        "in/a.npy --quant int4-block",
        None,
        &["--quant", "--group-size", "--block-size"],
    ),
    case(
        "predict",
        &["functions_s.mlpackage", "functions_s.npz"],
        "in/functions_s.mlpackage --inputs in/functions_s.npz --outputs out/y.npz",
        Some("out/y.npz"),
        &["--function", "--precision"],
    ),
    case(
        "predict",
        &["kv_state_s.mlpackage", "kv_state_s.npz"],
        "in/kv_state_s.mlpackage --inputs in/kv_state_s.npz --outputs out/y.npz",
        Some("out/y.npz"),
        &["--function"],
    ),
    case(
        "predict",
        &["index_s.mlpackage", "index_s.npz"],
        "in/index_s.mlpackage --inputs in/index_s.npz --outputs out/y.npz",
        Some("out/y.npz"),
        &["--precision"],
    ),
    case(
        "predict",
        &["norms_s.mlpackage", "norms_s.npz"],
        "in/norms_s.mlpackage --inputs in/norms_s.npz --outputs out/y.npz",
        Some("out/y.npz"),
        &["--precision"],
    ),
    case(
        "predict",
        &["lut4_g32.mlpackage", "lut4_g32.npz"],
        "in/lut4_g32.mlpackage --inputs in/lut4_g32.npz --outputs out/y.npz",
        Some("out/y.npz"),
        &["--precision"],
    ),
    case(
        "predict",
        &["conv_mix_s.mlpackage", "conv_mix_s.npz"],
        "in/conv_mix_s.mlpackage --inputs in/conv_mix_s.npz --outputs out/y.npz",
        Some("out/y.npz"),
        &["--precision"],
    ),
    case(
        "trace",
        &["gemma.anemoe", "golden.npz"],
        "in/gemma.anemoe --golden in/golden.npz",
        Some("in/gemma.anemoe/journal.jsonl"),
        &["--precision", "--swap", "--scratch"],
    ),
    case(
        "perplexity",
        &["gemma", "text.txt"],
        "in/gemma --text in/text.txt --context 8 --max-tokens 24",
        None,
        &["--context", "--max-tokens"],
    ),
    case(
        "perplexity",
        &["gemma.anemoe", "text.txt"],
        "in/gemma.anemoe --text in/text.txt --context 8 --max-tokens 24",
        None,
        &["--context", "--max-tokens"],
    ),
    case(
        "calibrate",
        &["gemma", "text.txt"],
        "in/gemma --text in/text.txt --context 8 --max-tokens 24 -o out/i.npz",
        Some("out/i.npz"),
        &["--context", "--max-tokens"],
    ),
    case("journal", &["gemma.anemoe"], "show in/gemma.anemoe", None, &["--entry"]),
    case(
        "journal",
        &["gemma.anemoe"],
        "add in/gemma.anemoe --lesson less",
        Some("in/gemma.anemoe/journal.jsonl"),
        &["--entry", "--intent", "--refs"],
    ),
    case("journal", &["gemma.anemoe", "zaya.anemoe"], "diff in/gemma.anemoe in/zaya.anemoe", None, &[]),
    case(
        "assemble",
        &["halves.anemoe"],
        "in/halves.anemoe --skip-gates",
        Some("in/halves.anemoe"),
        &["--golden", "--min-cosine"],
    ),
    case(
        "push",
        &["gemma.anemoe"],
        "in/gemma.anemoe out/store --name a",
        Some("out/store"),
        &["--name", "--jobs"],
    ),
    case("pull", &["store"], "in/store out/p.anemoe --name a", Some("out/p.anemoe"), &["--name", "--jobs"]),
];

/// Valid inputs, made once.
pub struct InputPool {
    pub folder: PathBuf,
}

impl InputPool {
    /// Makes every input in a folder; some are made by the binary.
    pub fn make(folder: &Path, binary: &Path) -> Result<InputPool, Box<dyn Error>> {
        fs::create_dir_all(folder.join("tmp"))?;
        let at = |name: &str| folder.join(name);
        let fixtures = root().join("fixtures");
        for (name, fixture) in
            [("gemma", "tiny-gemma4-moe-text"), ("zaya", "tiny-zaya"), ("sharded", "tiny-gemma4-moe")]
        {
            copy(&fixtures.join(fixture), &at(name))?;
            fs::remove_file(at(name).join("golden.npz"))?;
        }
        fs::write(at("gemma/tokenizer.json"), seeds::tokenizer(512)?.to_string())?;
        copy(&fixtures.join("tiny-gemma4-moe-text/golden.npz"), &at("golden.npz"))?;
        copy(&fixtures.join("tiny-zaya/golden.npz"), &at("golden-zaya.npz"))?;
        let gguf = gguf_of(&fixtures.join("tiny-gemma4-moe"), tiny::Options { fused: true, encode: as_f32 });
        fs::write(at("tiny.gguf"), gguf.write())?;
        let tests = root().join("crates/runtime/tests/interop");
        for name in ["functions_s", "kv_state_s", "index_s", "norms_s", "lut4_g32", "conv_mix_s"] {
            copy(&tests.join(name).join(format!("{name}.mlpackage")), &at(&format!("{name}.mlpackage")))?;
            let inputs = ["inputs.npz", "step0.npz"].map(|i| tests.join(name).join(i));
            let inputs = inputs.iter().find(|i| i.exists()).ok_or("inputs of a package")?;
            copy(inputs, &at(&format!("{name}.npz")))?;
        }
        copy(&root().join("crates/gates/src/residency/outcomes/known.tsv"), &at("known.tsv"))?;
        fs::write(at("text.txt"), "Once upon a time there was a small model that ran on a chip.\n")?;
        let values: Vec<f32> = (0..64 * 64).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect();
        write_npy(&at("a.npy"), &Array { shape: vec![64, 64], data: values.into() })?;
        fs::write(at("report.json"), REPORT)?;
        let pool = InputPool { folder: folder.to_path_buf() };
        for command in [
            "build gemma -o gemma.anemoe --skip-gates --tokens 1,4 --quant fp16",
            "build zaya -o zaya.anemoe --skip-gates --tokens 1 --quant fp16",
            "build gemma -o halves.anemoe --skip-gates --tokens 1 --quant fp16 --shard 0/2",
            "build gemma -o halves.anemoe --skip-gates --tokens 1 --quant fp16 --shard 1/2",
            "calibrate gemma --text text.txt --context 8 --max-tokens 24 -o importance.npz",
            "push gemma.anemoe store --name a",
        ] {
            pool.run(binary, command)?;
        }
        Ok(pool)
    }

    fn run(&self, binary: &Path, command: &str) -> Result<(), Box<dyn Error>> {
        let args: Vec<OsString> = command.split(' ').map(OsString::from).collect();
        let logs = self.folder.join("tmp");
        if process::drops_rights() {
            super::snapshot::give(&self.folder, process::NOBODY)?;
        }
        let ran = process::run(binary, &args, &self.folder, &logs, Duration::from_secs(60), None)?;
        if ran.status.success() {
            return Ok(());
        }
        Err(format!("{command}: {}", String::from_utf8_lossy(&ran.stderr)).into())
    }
}

/// A plan report for the package `functions_s`.
const REPORT: &str = r#"{"format":1,"os":"macOS 26.0.1","chip":"Apple M4 Max","compute_units":"cpuAndNeuralEngine",
"generator":"anemoe","plans":[{"package":"functions_s","function":"main","ops":[
{"name":"y","type":"ios18.mul","preferred":"ane","supported":["ane","gpu","cpu"],"cost":0.5}]}]}"#;

/// Returns the paths that a case may create or change.
pub fn allowed(case: &Case) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = case.output.map(PathBuf::from).into_iter().collect();
    if case.args.contains(G) && matches!(case.command, "bench" | "check") {
        all.push(PathBuf::from(G).join("journal.jsonl"));
    }
    if case.command == "pull" {
        // Files of a bundle that did not arrive completely.
        all.push("out/.p.anemoe.anemoe-pull".into());
    }
    all
}
