//! `anemoe tune`

use crate::args::planning::{PlanArgs, PlanUse, QuantChoice, plan_checkpoint};
use crate::args::step_limit::StepLimit;
use crate::bar_listener::BarListener;
use crate::command::{Command, Page, extended};
use crate::files::Overwrite;
use crate::ui::{Table, Ui};
use anemoe_convert::form::ShardForm;
use anemoe_convert::plan::PlanOptions;
use anemoe_io::Error;
use anemoe_mac::{FormChoice, Tuner};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Find the form of shards that the Neural Engine of this Mac takes.
///
/// Of each sort of shard the largest is built in each form (see `anemoe forms`), compiled, loaded, asked for its placement, and
/// run beside the CPU executor, with one token in a call and with as many as its largest function takes; each step in a process
/// of its own: a form that crashes or hangs costs only itself. Forms whose numbers are wrong are out; of the others the ones that
/// are wholly on the Neural Engine come first, then the fastest; within 3 % the simpler one. The winners go into a file for
/// `anemoe build --forms`. An interrupted run goes on. Exit status 1 when some sort has no form that works.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe tune models/small-gemma4 --quant lut4 -o forms.toml\n  anemoe build models/small-gemma4 --quant lut4 --forms forms.toml -o small.anemoe"
)]
pub struct Args {
    /// The checkpoint.
    checkpoint: PathBuf,
    /// File of the winners.
    #[arg(short, long, value_name = "F.toml", default_value = "forms.toml")]
    out: PathBuf,
    /// Folder of the trials, which a later run goes on with [default: beside the file, with the ending .tune].
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Calls that are measured of each form: so many of one token, and so many of the largest token count.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    calls: u32,
    /// Sorts of shards to look at: attention, experts, experts_combine, moe, layers, head [default: all].
    #[arg(long, value_name = "SORT,..", value_delimiter = ',')]
    sorts: Vec<String>,
    /// Try forms again that an earlier run has tried.
    #[arg(long)]
    again: bool,
    #[command(flatten)]
    limit: StepLimit,
    #[command(flatten)]
    overwrite: Overwrite,
    #[command(flatten)]
    options: PlanArgs,
}

impl Command for Args {
    type Report = Page;

    fn run(mut self, ui: &Ui) -> anyhow::Result<Page> {
        anemoe_coreml::available()?;
        let output = self.overwrite.output(&self.out)?;
        anyhow::ensure!(
            ShardForm { layers_per_shard: None, ..self.options.form.form() } == ShardForm::default()
                && self.options.form.forms()?.is_empty(),
            "tune tries all forms: options that name one, but for --layers-per-shard, are those of `build`"
        );
        self.options.quant.get_or_insert(QuantChoice::Kind(PlanOptions::default().quant));
        let planned = plan_checkpoint(&self.checkpoint, &self.options, PlanUse::Build, ui)?;
        let work = self.work.unwrap_or_else(|| self.out.with_extension("tune"));
        let listener = &BarListener::new(ui);
        let tuner = Tuner {
            family: &planned.family,
            plan: &planned.plan,
            importance: planned.importance.as_ref(),
            work: std::path::absolute(&work)?,
            calls: self.calls,
            again: self.again,
            limit: self.limit.limit(),
            listener,
        };
        let report = tuner.run(&self.sorts)?;
        let text = report.forms_file();
        output.write(|file| file.write_all(text.as_bytes())).map_err(|e| Error::io(&self.out, e))?;
        let [out, work] = [self.out, work].map(|path| path.display().to_string());
        let mut lines: Vec<String> = report.sorts.iter().flat_map(lines).collect();
        lines.push(format!("{out}: for anemoe build --forms; trials stay in {work}"));
        let document = extended(json!({"out": out, "work": work}), &report)?;
        Ok(Page { passed: report.faults.is_empty(), ..Page::new(document, lines) })
    }
}

fn lines(choice: &FormChoice) -> Vec<String> {
    let mut table =
        Table::ending_in_text(&["form", "tokens", "ANE ops", "elsewhere", "none", "us a call", "cosine", ""]);
    for t in &choice.trials {
        let is_chosen = choice.chosen.as_ref() == Some(&t.form);
        let mark = if is_chosen { "chosen".into() } else { t.out.clone().unwrap_or_default() };
        for (i, judged) in t.tokens.iter().enumerate() {
            let (us, cosine) = match &judged.figures {
                Some(f) => (format!("{:.0}", f.median_us), format!("{:.4}", f.min_cosine)),
                None => (String::new(), String::new()),
            };
            let [ane, elsewhere, none] = judged.placement.ops.map(|n| n.to_string());
            let (form, mark) = if i == 0 { (t.form.clone(), mark.clone()) } else { Default::default() };
            table.row(vec![form, judged.tokens.to_string(), ane, elsewhere, none, us, cosine, mark]);
        }
    }
    let mut lines = vec![format!("{} ({})", choice.sort.name(), choice.shard)];
    lines.extend(table.lines());
    lines.push(format!("{}: {}\n", choice.chosen.as_deref().unwrap_or("none"), choice.reason));
    lines
}
