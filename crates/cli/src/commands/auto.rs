//! Options that decide a plan, and `--quant auto`.

use super::build::read_importance;
use super::golden;
use super::plan::Options;
use super::text::read_text;
use crate::ui::Ui;
use anemoe_bundle::AutoChoice;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::importance::Importance;
use anemoe_convert::models;
use anemoe_convert::models::Family;
use anemoe_convert::plan::Plan;
use anemoe_convert::quant::Quant;
use anemoe_gates::auto::{Goal, MAX_WHOLE, Search, choose};
use anemoe_gates::text::windows;
use anyhow::bail;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Text that models are run on where the user gives none.
const TEXT: &str = include_str!("../calibration.txt");
/// Tokens of it, and of a window.
const TOKENS: usize = 192;
const WINDOW: usize = 96;
/// Cosine that is aimed at when nothing is said: that of the golden gate.
const MIN_COSINE: f64 = 0.97;

/// A kind for all, or a search for one per tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QuantChoice {
    Kind(Quant),
    Auto,
}

impl FromStr for QuantChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(QuantChoice::Auto);
        }
        text.parse().map(QuantChoice::Kind).map_err(|e: String| format!("{e}; or auto"))
    }
}

/// A number of bytes, with kB, MB, GB, KiB, MiB or GiB.
pub fn byte_count(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit {
        "" | "B" => 1.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "KiB" => 1024.0,
        "MiB" => 1048576.0,
        "GiB" => 1073741824.0,
        _ => return Err(format!("`{text}`: unknown unit `{unit}`")),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if n.is_finite() && n >= 1.0 => Ok((n * factor) as u64),
        _ => Err(format!("`{text}` is not a number of bytes")),
    }
}

/// A checkpoint, opened, with the plan that the options ask for.
pub struct Planned {
    pub family: Box<dyn Family>,
    pub plan: Plan,
    pub importance: Option<Importance>,
}

/// Opens a checkpoint and plans it. With `gated`, `--min-cosine` is what gates want, too.
pub fn plan(spec: &Path, options: &Options, gated: bool, ui: &Ui) -> anyhow::Result<Planned> {
    let auto = options.quant == QuantChoice::Auto;
    for (given, name) in [
        (options.min_cosine.is_some() && !gated, "--min-cosine"),
        (options.max_bytes.is_some(), "--max-bytes"),
        (options.auto_text.is_some(), "--auto-text"),
    ] {
        if given && !auto {
            bail!("{name} is a goal of --quant auto");
        }
    }
    if let Some(c) = options.min_cosine.filter(|c| !(0.0..=1.0).contains(c)) {
        bail!("--min-cosine {c} is not a cosine between 0 and 1");
    }
    let family = models::open(options.reading.open(spec)?)?;
    let mut plan = family.plan(&options.to_plan_options())?;
    let importance = options.importance.as_deref().map(|path| read_importance(path, &plan)).transpose()?;
    if auto {
        let goal = match (options.max_bytes, options.min_cosine) {
            (Some(n), _) => Goal::MaxBytes(n),
            (None, c) => Goal::MinCosine(c.unwrap_or(MIN_COSINE)),
        };
        let checkpoint = options.reading.open(spec)?;
        let (windows, text) = tokens(&checkpoint, &plan, options.auto_text.as_ref())?;
        let search = Search {
            checkpoint: &checkpoint,
            family: family.as_ref(),
            importance: importance.as_ref(),
            windows: &windows,
            text,
        };
        let bar = ui.bar(1, "choosing kinds");
        let chosen = choose(&search, &mut plan, goal, &mut |what, done, total| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
            bar.set_message(what.to_string());
        });
        bar.finish_and_clear();
        chosen?;
    }
    Ok(Planned { family, plan, importance })
}

/// Ids that are spread evenly over the vocabulary, for models without a tokenizer.
fn spread_ids(n: usize, plan: &Plan) -> Vec<u32> {
    let vocab = plan.chain.model.vocab_size as u64;
    (1..=n as u64).map(|i| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % vocab) as u32).collect()
}

/// The prompt that a build's gates run, and how many tokens behind it: fewer for models that take long.
pub fn gate_prompt(checkpoint: &Checkpoint, plan: &Plan) -> anyhow::Result<(Vec<u32>, usize)> {
    let (prompt, decode) = if plan.totals.params > MAX_WHOLE { (8, 4) } else { (16, 8) };
    // The caches have to hold both.
    let prompt = prompt.min(plan.chain.model.max_context.saturating_sub(decode)).max(1);
    let bos = golden::bos(checkpoint);
    let mut ids = match golden::tokenizer(checkpoint) {
        Ok(tokenizer) => tokenizer.encode(TEXT, bos)?,
        Err(_) => bos.into_iter().chain(spread_ids(prompt, plan)).collect(),
    };
    ids.truncate(prompt);
    Ok((ids, decode.min(plan.chain.model.max_context.saturating_sub(prompt))))
}

/// Windows of tokens to run the model on, and where they come from.
fn tokens(
    checkpoint: &Checkpoint,
    plan: &Plan,
    file: Option<&PathBuf>,
) -> anyhow::Result<(Vec<Vec<u32>>, String)> {
    if plan.totals.params > MAX_WHOLE {
        if let Some(path) = file {
            bail!(
                "--auto-text {}: models of more than {MAX_WHOLE} parameters are not run for --quant auto",
                path.display()
            );
        }
        return Ok((Vec::new(), String::new()));
    }
    let bos = golden::bos(checkpoint);
    let context = WINDOW.min(plan.chain.model.max_context);
    match golden::tokenizer(checkpoint) {
        Ok(tokenizer) => {
            let (text, name) = match file {
                None => (TEXT.to_string(), "a built-in text".to_string()),
                Some(path) => {
                    let text = read_text(path)?;
                    let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
                    (text, name.unwrap_or_default())
                }
            };
            let windows = windows(&tokenizer.encode(&text, bos)?, bos, context, TOKENS);
            if windows.is_empty() {
                bail!("the text has no token to predict");
            }
            Ok((windows, name))
        }
        Err(e) if file.is_some() => Err(e.context("--auto-text needs the model's tokenizer")),
        // Without a tokenizer any tokens are as good as others.
        Err(_) => {
            let ids = spread_ids(TOKENS, plan);
            Ok((windows(&ids, bos, context, TOKENS), "evenly spread tokens (there is no tokenizer)".into()))
        }
    }
}

/// The search's result for people.
pub fn print(auto: &AutoChoice, ui: &Ui) -> std::io::Result<()> {
    use crate::ui::{Table, bytes};
    ui.line(format!("\nkinds chosen for {} on {}", auto.goal, auto.measured_on))?;
    let mut table = Table::new(&["tensor", "part", "kind", "bytes", "output error", "sensitivity"]);
    for t in &auto.tensors {
        table.row(vec![
            t.tensor.clone(),
            t.part.clone(),
            t.kind.clone(),
            bytes(t.bytes),
            format!("{:.2e}", t.output_error),
            format!("{:.2e}", t.sensitivity),
        ]);
    }
    table.print(ui)?;
    if let (Some(min), Some(mean)) = (auto.min_cosine, auto.mean_cosine) {
        let mut table = Table::new(&["whole model", "bytes", "lowest cosine", "mean cosine"]);
        table.row(vec!["auto".into(), bytes(auto.bytes), format!("{min:.5}"), format!("{mean:.6}")]);
        for u in &auto.uniform {
            let (min, mean) = (format!("{:.5}", u.min_cosine), format!("{:.6}", u.mean_cosine));
            table.row(vec![u.kind.clone(), bytes(u.bytes), min, mean]);
        }
        ui.line("")?;
        table.print(ui)?;
    }
    ui.line("the reason for each kind is in --json, --out and chain.json\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_have_units() {
        assert_eq!(byte_count("6000000"), Ok(6_000_000));
        assert_eq!(byte_count("1.5GB"), Ok(1_500_000_000));
        assert_eq!(byte_count("2MiB"), Ok(2 << 20));
        for wrong in ["", "GB", "-1", "5 apples", "nan", "inf", "0"] {
            assert!(byte_count(wrong).is_err(), "{wrong}");
        }
    }
}
