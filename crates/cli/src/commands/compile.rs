//! `anemoe compile`

use crate::args::runner::CompiledArgs;
use crate::bundle::Verify;
use crate::outcome::Outcome;
use crate::target::expect_bundle;
use crate::ui::Ui;
use std::path::PathBuf;

/// Compile a bundle for the Neural Engine of this Mac.
///
/// Compiled models lie in a cache, by content, version of the system and chip: what is compiled already stays as it is.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  anemoe compile small.anemoe")]
pub struct Args {
    /// The bundle.
    bundle: PathBuf,
    /// Compile again what is compiled, for instance behind an error -14.
    #[arg(long)]
    again: bool,
    #[command(flatten)]
    cache: CompiledArgs,
    #[command(flatten)]
    verify: Verify,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    expect_bundle(&args.bundle)?;
    let chain = args.verify.open(&args.bundle, ui)?;
    let models = args.cache.models(&args.bundle, &chain);
    let (mut new, mut known) = (0, 0);
    let bar = ui.bar(chain.shards.len() as u64, "packages");
    for shard in &chain.shards {
        let package = args.bundle.join(&shard.file);
        bar.set_message(shard.name.clone());
        if !args.again && models.find(&package).is_some() {
            known += 1;
        } else {
            // Beside the package where the system has no name, and so no place in the cache.
            let target =
                models.place(&package).unwrap_or_else(|| package.with_extension(anemoe_coreml::COMPILED));
            anemoe_coreml::compile(&package, &target)?;
            new += 1;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    ui.document(&serde_json::json!({"bundle": args.bundle, "compiled": new, "already_compiled": known}))?;
    ui.line(format!("{new} packages compiled, {known} were already"))?;
    Ok(Outcome::Done)
}
