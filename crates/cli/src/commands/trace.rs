//! `anemoe trace`

use super::precision::PrecisionArg;
use crate::Outcome;
use crate::journal::{JournalArgs, Recorder, facts};
use crate::ui::{Table, Ui};
use anemoe_bundle::journal::status;
use anemoe_gates::reference::Golden;
use anemoe_gates::trace::{self, Fidelity, Trace};
use std::path::PathBuf;

/// Where a bundle leaves its reference: cosine of the residual stream behind every layer, and how wide that stream is.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe trace small.anemoe --golden models/small-gemma4/golden.npz")]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Reference run with hidden states, from `anemoe golden` or Hugging Face transformers.
    #[arg(long, value_name = "F.npz")]
    golden: PathBuf,
    /// fp32 computes in f32 on the stored weights; fp16 rounds every result, as the device does.
    #[arg(long, value_enum, default_value = "fp32")]
    precision: PrecisionArg,
    #[command(flatten)]
    journal: JournalArgs,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let golden = Golden::read(&args.golden)?;
    let recorder = Recorder::new(&args.journal, "trace");
    let found = trace::trace(&args.bundle, &golden, args.precision.into())?;
    recorder.end(&args.bundle, status::DONE, facts::trace(&found, &args.golden));
    ui.document(&found)?;
    print(&found, ui)?;
    Ok(Outcome::Done)
}

fn print(t: &Trace, ui: &Ui) -> std::io::Result<()> {
    let mut columns = vec!["behind", "lowest cosine", "at", "mean"];
    if t.f32_stream {
        columns.extend(["lowest, stream in fp16", "at"]);
    }
    columns.extend(["largest value", "rms", "stream / change"]);
    let mut table = Table::new(&columns);
    for l in &t.layers {
        let name = match l.boundary {
            0 => "embedding".to_string(),
            i => format!("layer {}", i - 1),
        };
        let cosine = |c: f64| format!("{c:.7}");
        let Fidelity { min_cosine, position, mean_cosine } = l.fidelity;
        let mut row = vec![name, cosine(min_cosine), position.to_string(), cosine(mean_cosine)];
        if t.f32_stream {
            let f = l.fp16_stream;
            row.push(f.map_or_else(String::new, |f| cosine(f.min_cosine)));
            row.push(f.map_or_else(String::new, |f| f.position.to_string()));
        }
        row.push(format!("{:.3}", l.largest));
        row.push(format!("{:.3}", l.rms));
        row.push(l.stream_to_change.map_or_else(String::new, |r| format!("{r:.1}")));
        table.row(row);
    }
    table.print(ui)?;
    ui.line(
        "stream / change: length of the stream over what the layer changed, at most; fp16 keeps 11 bits",
    )?;
    if t.f32_stream {
        ui.line("the host keeps this stream in f32; the columns `stream in fp16` show what rounding it would cost")?;
    }
    Ok(())
}
