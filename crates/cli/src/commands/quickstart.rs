//! `anemoe quickstart`

use super::{check, generate, validate};
use crate::args::planning::{PlanArgs, PlanUse, PlannedCheckpoint, plan_checkpoint};
use crate::command::{Command, CommandReport, Page, parse};
use crate::recorder::{JournalArgs, Recorder};
use crate::show;
use crate::show::build_report::summary;
use crate::ui::{self, Table, Ui};
use anemoe_bundle::journal::status;
use anemoe_convert::build::check_scratch;
use anemoe_gates::facts;
use anemoe_gates::residency;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Plan, build, check and run the small model of the repository.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe quickstart --prompt 'def read_file(path):'")]
pub struct Args {
    /// Folder of the model, with its golden.npz [default: models/small-gemma4 of the repository].
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Keep the two bundles in this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Text that the model continues.
    #[arg(long, default_value = "def __init__(self, name):\n")]
    prompt: String,
    /// Most new tokens.
    #[arg(long, value_name = "N", default_value_t = 96)]
    max_new: usize,
}

/// Options of the plans: caches that hold the prompt and the generated text.
const OPTIONS: &str = "--max-context=512";
/// Options of the text: sampling, since so small a model repeats itself when it always takes the most probable token.
const SAMPLING: [&str; 6] =
    ["--temperature=0.7", "--top-k=40", "--top-p=0.95", "--seed=3", "--ignore-eos", "--speculate=off"];

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        let model = self.model.map_or_else(find_model, Ok)?;
        let scratch = crate::files::scratch(None)?;
        if let Some(folder) = &self.out {
            std::fs::create_dir_all(folder).map_err(|e| anemoe_convert::Error::io(folder, e))?;
        }
        let folder = self.out.as_deref().unwrap_or(scratch.path());
        let (inner, text) =
            (Ui::inner(), [format!("--prompt={}", self.prompt), format!("--max-new={}", self.max_new)]);
        let (mut runs, mut rows, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        let (mut residency, mut passed) = (Value::Null, true);
        for (quant, words) in [("fp16", [OPTIONS, "--quant=fp16"].as_slice()), ("auto", &[OPTIONS])] {
            // The steps of the second build are shown.
            let shown = if quant == "auto" { ui } else { &inner };
            let options = parse::<PlanArgs>("plan", words)?;
            let PlannedCheckpoint { family, plan, .. } =
                plan_checkpoint(&model, &options, PlanUse::Build, ui)?;
            shown.line("\n1. Plan\n")?;
            let placement = residency::plan(&family, &plan, &residency::CheckOptions::default())?;
            shown.lines(|lines| show::plan_table::show(&plan, &placement, false, lines))?;
            shown.line("\n2. Build\n")?;
            check_scratch(folder, plan.bundle_bytes())?;
            let bundle = folder.join(format!("{quant}.anemoe"));
            let recorder = Recorder::new(&JournalArgs::default(), "build");
            // A build without gates: these are shown one by one below.
            let built = anemoe_convert::build::build(&family, &plan, None, &bundle, 1, &|_| ())?;
            recorder.end(&bundle, status::DONE, facts::build(&built, &bundle, None));
            shown.line(summary(&built))?;
            shown.line("\n3. Residency: which operations the Neural Engine will run, as predicted\n")?;
            let name = || OsString::from(&bundle);
            let checked = parse::<check::Args>("check", &[name()])?.run(&inner)?;
            checked.print(shown)?;
            shown.line(
                "\n4. Golden gate: logits against the golden, the checkpoint run in f32, after each token\n",
            )?;
            let words = [name(), "--golden".into(), model.join("golden.npz").into()];
            let validation = parse::<validate::Args>("validate", &words)?.run(&inner)?;
            validation.print(shown)?;
            shown.line("\n5. Text\n")?;
            shown.part(&self.prompt)?;
            let mut words = vec![name()];
            words.extend(text.iter().map(String::as_str).chain(SAMPLING).map(OsString::from));
            let generated = parse::<generate::Args>("generate", &words)?.run(shown)?;
            residency = checked.document;
            let (v, t) = (&validation.document, &generated.timing);
            rows.push(vec![
                quant.to_string(),
                ui::bytes(built.package_bytes),
                format!("{:.1}", built.seconds),
                format!("{:.2}", t.load_s),
                format!("{:.5}", v["min_cosine"].as_f64().unwrap_or(0.0)),
                format!("{} of {}", v["tokens_equal"], v["expected_ids"].as_array().map_or(0, Vec::len)),
                format!("{:.0}", t.prefill_tokens as f64 / t.prefill_s),
                format!("{:.0}", t.decode_tok_s),
            ]);
            passed &= validation.passed;
            runs.push(json!({
                "quant": quant, "bytes": built.package_bytes, "build_s": built.seconds, "validation": v,
                "generated_ids": generated.generated_ids, "timing": t,
            }));
            kept.extend(self.out.as_ref().map(|_| format!("kept: {}", bundle.display())));
        }
        let gates = ["", "packages", "build s", "load s", "min cosine", "tokens equal"];
        let headings = [&gates[..], &["prompt tok/s", "decode tok/s"]].concat();
        let mut lines = vec!["\n6. FP16 and the chosen kinds side by side\n".to_string()];
        lines.extend(Table::new(&headings).with_rows(rows).lines());
        lines.extend(kept);
        let document = json!({"model": model.display().to_string(), "runs": runs, "residency": residency});
        Ok(Page { passed, ..Page::new(document, lines) })
    }
}

/// Finds the small model of the repository: `models/small-gemma4` below the current folder or a folder above the program.
pub fn find_model() -> anyhow::Result<PathBuf> {
    let name = Path::new("models/small-gemma4");
    let exe = std::env::current_exe().ok();
    let above = exe.iter().flat_map(|e| e.ancestors().skip(1).map(|d| d.join(name)));
    std::iter::once(name.to_path_buf()).chain(above).find(|p| p.join("config.json").is_file()).ok_or_else(|| {
        anyhow::anyhow!("models/small-gemma4 is neither here nor above the program: run this in the repository, or give --model")
    })
}
