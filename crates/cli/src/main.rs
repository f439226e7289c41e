//! The `anemoe` binary: one file per sub-command.
//!
//! # Tests
//! `tests/` runs the built binary: builds and gates of the fixtures, the output of each command, interrupted and shared
//! builds, and one line for every wrong file or option. `cargo test -p anemoe` runs for 5 minutes on two busy cores,
//! besides the compilation.

mod args;
mod bar_listener;
mod bundle;
mod commands;
mod environment;
mod error_report;
mod experiment;
mod files;
mod gate_reference;

mod machine;
mod other_tools;
mod outcome;
mod part_store;
mod recorder;
mod registry;
mod shell;
mod show;
mod signals;
mod standing;
mod target;
mod ui;
mod welcome;

use crate::outcome::Outcome;
use anyhow::Context;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Allocator that reports where no memory is left.
#[global_allocator]
static ALLOCATOR: anemoe_io::ReportingAllocator = anemoe_io::ReportingAllocator;

/// Takes Mixture-of-Experts language models to the Apple Neural Engine, and to any CPU.
#[derive(Parser)]
#[command(name = "anemoe", version, max_term_width = 110)]
#[command(
    after_help = "Examples:\n  anemoe quickstart\n  anemoe build models/small-gemma4 -o my.anemoe\n  anemoe generate my.anemoe --prompt 'def main():'\n\nanemoe COMMAND --help says more about a command."
)]
struct Cli {
    /// Print one JSON document on standard output; progress and messages go to standard error.
    #[arg(long, global = true)]
    json: bool,
    /// Threads to compute with; the default is one per processor.
    #[arg(long, global = true, value_name = "N")]
    threads: Option<usize>,
    /// Experiment that this is done for: its figures are held against what is expected (see `anemoe journal new`). A bundle
    /// remembers the experiment that it was built for.
    #[arg(long, global = true, value_name = "BOOK/ID", value_hint = clap::ValueHint::Other)]
    experiment: Option<PathBuf>,
    /// Fetch nothing: a checkpoint hf:OWNER/NAME is what the cache holds of it.
    #[arg(long, global = true)]
    offline: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Quickstart(commands::quickstart::Args),
    Inspect(commands::inspect::Args),
    Plan(commands::plan::Args),
    Forms(commands::forms::Args),
    Build(commands::build::Args),
    Assemble(commands::assemble::Args),
    Check(commands::check::Args),
    Compile(commands::compile::Args),
    Golden(commands::golden::Args),
    Calibrate(commands::calibrate::Args),
    Perplexity(commands::perplexity::Args),
    Validate(commands::validate::Args),
    Trace(commands::trace::Args),
    Tune(commands::tune::Args),
    Generate(commands::generate::Args),
    Chat(commands::chat::Args),
    Serve(commands::serve::Args),
    Bench(commands::bench::Args),
    Predict(commands::predict::Args),
    PredictSpeed(commands::predict_speed::Args),
    Quantize(commands::quantize::Args),
    Journal(commands::journal::Args),
    Reproduce(commands::reproduce::Args),
    Report(commands::report::Args),
    Push(commands::push::Args),
    Pull(commands::pull::Args),
    Doctor(commands::doctor::Args),
    VerifyOnMac(commands::verify_on_mac::Args),
    ImportReport(commands::import_report::Args),
    Completions(commands::completions::Args),
    Man(commands::man::Args),
    #[command(hide = true)]
    Step(commands::step::Args),
}

fn main() -> ExitCode {
    let mut command = Cli::command();
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let cli = match matches.and_then(|m| {
        recorder::remember(&command, &m);
        files::remember(&command, &m);
        Cli::from_arg_matches(&m).map_err(|e| e.format(&mut command))
    }) {
        Ok(cli) => cli,
        Err(e) => return error_report::usage(other_tools::explained(e, &command)),
    };
    let Some(chosen) = cli.command else { return welcome::print(cli.json) };
    tracing_subscriber::fmt()
        .with_writer(|| ui::LogWriter)
        .with_ansi(false)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("ANEMOE_LOG").unwrap_or_else(|_| "warn".into()),
        )
        .init();
    let json = cli.json;
    if json {
        anemoe_io::report_as_json();
    }
    if let Err(e) = signals::install(move || error_report::interrupted(json)) {
        return error_report::report(&e, cli.json);
    }
    let threads = match environment::instructions().and_then(|()| environment::threads(cli.threads)) {
        Ok(threads) => threads,
        Err(e) => return error_report::report(&e, cli.json),
    };
    if let Some(n) = threads {
        anemoe_kernels::Pool::set_threads(n);
    }
    // At its first use Rayon would panic where its threads cannot start.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0)).build_global();
    if let Err(e) = pool.context("no thread can be started; --threads 1 needs the fewest") {
        return error_report::report(&e, cli.json);
    }
    if cli.offline {
        args::hub_checkpoint::stay_offline();
    }
    let experiment = match recorder::experiment(cli.experiment.as_deref()) {
        Ok(experiment) => experiment,
        Err(e) => return error_report::report(&e, cli.json),
    };
    let ui = ui::Ui::new(cli.json, experiment.is_some());
    let result = match chosen {
        Command::Quickstart(args) => commands::quickstart::run(args, &ui),
        Command::Inspect(args) => commands::inspect::run(args, &ui),
        Command::Plan(args) => commands::plan::run(args, &ui),
        Command::Forms(args) => commands::forms::run(args, &ui),
        Command::Build(args) => commands::build::run(args, &ui),
        Command::Assemble(args) => commands::assemble::run(args, &ui),
        Command::Check(args) => commands::check::run(args, &ui),
        Command::Compile(args) => commands::compile::run(args, &ui),
        Command::Golden(args) => commands::golden::run(args, &ui),
        Command::Calibrate(args) => commands::calibrate::run(args, &ui),
        Command::Perplexity(args) => commands::perplexity::run(args, &ui),
        Command::Validate(args) => commands::validate::run(args, &ui),
        Command::Trace(args) => commands::trace::run(args, &ui),
        Command::Tune(args) => commands::tune::run(args, &ui),
        Command::Generate(args) => commands::generate::run(args, &ui),
        Command::Chat(args) => commands::chat::run(args, &ui),
        Command::Serve(args) => commands::serve::run(args, &ui),
        Command::Bench(args) => commands::bench::run(args, &ui),
        Command::Predict(args) => commands::predict::run(args, &ui),
        Command::PredictSpeed(args) => commands::predict_speed::run(args, &ui),
        Command::Quantize(args) => commands::quantize::run(args, &ui),
        Command::Journal(args) => commands::journal::run(args, &ui),
        Command::Reproduce(args) => commands::reproduce::run(args, &ui),
        Command::Report(args) => commands::report::run(args, &ui),
        Command::Push(args) => commands::push::run(args, &ui),
        Command::Pull(args) => commands::pull::run(args, &ui),
        Command::Doctor(args) => commands::doctor::run(args, &ui),
        Command::VerifyOnMac(args) => commands::verify_on_mac::run(args, &ui),
        Command::ImportReport(args) => commands::import_report::run(args, &ui),
        Command::Completions(args) => commands::completions::run(args, Cli::command(), &ui),
        Command::Man(args) => commands::man::run(args, Cli::command(), &ui),
        Command::Step(args) => commands::step::run(args),
    };
    if let Some(experiment) = experiment {
        experiment.end(&result, ui.into_document().as_ref());
    }
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::GateFailed) => ExitCode::from(1),
        Err(e) => error_report::report(&e, cli.json),
    }
}
