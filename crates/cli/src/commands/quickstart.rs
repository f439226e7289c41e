//! `anemoe quickstart`

use super::generate::{self, Timing};
use crate::args::planning::{PlanArgs, PlanUse, PlannedCheckpoint, plan_checkpoint};
use crate::command::{Command, CommandReport};
use crate::outcome::Outcome;
use crate::recorder::{JournalArgs, Recorder, facts};
use crate::show;
use crate::show::build_report::summary;
use crate::show::gate_results::print_golden;
use crate::ui::{self, Table, Ui};
use anemoe_bundle::journal::status;
use anemoe_convert::build::check_scratch;
use anemoe_gates::golden_gate::{self, GoldenGate};
use anemoe_gates::reference::Golden;
use anemoe_gates::residency;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::generate::GenerateOptions;
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::Sampling;
use anemoe_runtime::speculate::Speculation;
use anemoe_runtime::tokenizer::Tokenizer;
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

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

/// Positions of the caches: enough for the prompt and the generated text.
const CONTEXT: &str = "512";

impl Command for Args {
    type Report = QuickstartReport;

    fn run(self, ui: &Ui) -> anyhow::Result<QuickstartReport> {
        let model = match self.model {
            Some(dir) => dir,
            None => find_model()?,
        };
        let scratch = crate::files::scratch(None)?;
        let folder = match &self.out {
            Some(dir) => {
                std::fs::create_dir_all(dir).map_err(|e| anemoe_convert::Error::io(dir, e))?;
                dir.clone()
            }
            None => scratch.path().to_path_buf(),
        };
        let reference = Golden::read(&model.join("golden.npz"))?;
        let mut runs = Vec::new();
        let mut residency = None;
        for (kinds, words) in [("fp16", ["--quant", "fp16"].as_slice()), ("auto", &[])] {
            let main = kinds == "auto";
            let options = PlanArgs::from_words(&[&["--max-context", CONTEXT], words].concat())?;
            let PlannedCheckpoint { family, plan, .. } = plan_checkpoint(&model, &options, PlanUse::Build, ui)?;
            if main {
                ui.line("\n1. Plan\n")?;
                let placement = residency::plan(family.as_ref(), &plan, &residency::CheckOptions::default())?;
                show::plan_table::print(&plan, &placement, false, ui)?;
                ui.line("\n2. Build\n")?;
            }
            check_scratch(&folder, plan.bundle_bytes())?;
            let bundle = folder.join(format!("{kinds}.anemoe"));
            let journal = JournalArgs::default();
            let recorder = Recorder::new(&journal, "build");
            // A build without gates: these are shown one by one below.
            let built = anemoe_convert::build::build(family.as_ref(), &plan, None, &bundle, 1, &|_| ())?;
            recorder.end(&bundle, status::DONE, facts::build(&built, &bundle, None));
            let started = Instant::now();
            let loaded = Model::open(&bundle, &CpuBackend::default())?;
            let load = started.elapsed();
            if main {
                ui.line(summary(&built))?;
                ui.line("\n3. Residency: which operations the Neural Engine will run, as predicted\n")?;
                let recorder = Recorder::new(&journal, "check");
                let checked =
                    residency::bundle(&bundle, loaded.chain(), &residency::CheckOptions::default(), || {})?;
                recorder.gate(&bundle, checked.pass, facts::residency(&checked));
                show::placement::print(&checked, ui)?;
                residency = Some(checked);
                ui.line(
                    "\n4. Golden gate: logits against the golden, the checkpoint run in f32, after each token\n",
                )?;
            }
            let recorder = Recorder::new(&journal, "validate");
            let gate = golden_gate::gate(&bundle, &reference, golden_gate::MIN_COSINE)?;
            recorder.gate(&bundle, gate.pass, facts::validation(&gate, Some(&model.join("golden.npz"))));
            if main {
                print_golden(&gate, ui)?;
                ui.line("\n5. Text\n")?;
            }
            let tokenizer = Tokenizer::open(&bundle.join("tokenizer.json"))?;
            let prompt = tokenizer.encode(&self.prompt, loaded.chain().model.bos_token_id)?;
            // Sampling, since so small a model repeats itself when it always takes the most probable token.
            let sampling = Sampling { temperature: 0.7, top_k: 40, top_p: 0.95, seed: 3, ..Sampling::GREEDY };
            let options = GenerateOptions {
                max_new: self.max_new,
                sampling,
                ignore_eos: true,
                prefill_chunk: None,
                speculation: Speculation::default(),
            };
            loaded.prepare(1, Logits::Last);
            loaded.prepare(prompt.len(), Logits::Last);
            let generated = if main {
                ui.part(&self.prompt)?;
                generate::stream(&loaded, &prompt, &options, Some(&tokenizer), ui)?
            } else {
                anemoe_runtime::generate::generate(&loaded, &mut loaded.sequence(), &prompt, &options, |_| true)?
            };
            runs.push(QuickstartBuild {
                quant: kinds,
                bundle,
                bytes: built.package_bytes,
                build_s: built.seconds,
                validation: gate,
                timing: Timing::new(&generated, load),
                generated_ids: generated.ids,
            });
        }
        let (model, is_kept) = (model.display().to_string(), self.out.is_some());
        Ok(QuickstartReport { model, runs, residency, is_kept })
    }
}

/// The two builds side by side.
#[derive(Serialize)]
pub struct QuickstartReport {
    model: String,
    runs: Vec<QuickstartBuild>,
    residency: Option<residency::Report>,
    /// True if the bundles stay.
    #[serde(skip)]
    is_kept: bool,
}

/// One of the two builds.
#[derive(Serialize)]
struct QuickstartBuild {
    /// `fp16`, or `auto` for the kinds that are chosen by default.
    quant: &'static str,
    #[serde(skip)]
    bundle: PathBuf,
    bytes: u64,
    build_s: f64,
    validation: GoldenGate,
    generated_ids: Vec<u32>,
    timing: Timing,
}

impl CommandReport for QuickstartReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        ui.line("\n6. FP16 and the chosen kinds side by side\n")?;
        let mut table = Table::new(&[
            "",
            "packages",
            "build s",
            "load s",
            "min cosine",
            "tokens equal",
            "prompt tok/s",
            "decode tok/s",
        ]);
        for run in &self.runs {
            let (v, t) = (&run.validation.exact, &run.timing);
            let equal = v.generated_ids.iter().zip(&v.expected_ids).take_while(|(a, b)| a == b).count();
            table.row(vec![
                run.quant.to_string(),
                ui::bytes(run.bytes),
                format!("{:.1}", run.build_s),
                format!("{:.2}", t.load_s),
                format!("{:.5}", v.min_cosine),
                format!("{equal} of {}", v.expected_ids.len()),
                format!("{:.0}", t.prefill_tokens as f64 / t.prefill_s),
                format!("{:.0}", t.decode_tok_s),
            ]);
        }
        table.print(ui)?;
        let kept = self.runs.iter().filter(|_| self.is_kept);
        kept.map(|run| run.bundle.display()).try_for_each(|bundle| ui.line(format!("kept: {bundle}")))
    }

    fn outcome(&self) -> Outcome {
        Outcome::of(self.runs.iter().all(|r| r.validation.pass))
    }
}

/// Finds the small model of the repository: `models/small-gemma4` below the current folder or a folder above the program.
///
/// # Errors
/// The model is in none of these places.
pub fn find_model() -> anyhow::Result<PathBuf> {
    let name = Path::new("models/small-gemma4");
    let exe = std::env::current_exe().ok();
    let above = exe.iter().flat_map(|e| e.ancestors().skip(1).map(|d| d.join(name)));
    std::iter::once(name.to_path_buf()).chain(above).find(|p| p.join("config.json").is_file()).ok_or_else(|| {
        anyhow::anyhow!("models/small-gemma4 is neither here nor above the program: run this in the repository, or give --model")
    })
}
