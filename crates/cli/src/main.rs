//! The `anemoe` binary: one file per sub-command.
//!
//! # Tests
//! `tests/` runs the built binary: builds and gates of the fixtures, the output of each command, interrupted and shared
//! builds, and one line for every wrong file or option. `cargo test -p anemoe` runs for 5 minutes on two busy cores,
//! besides the compilation.

mod args;
mod bar_listener;
mod bundle;
mod command;
mod commands;
mod environment;
mod error_report;
mod files;
mod gate_reference;
mod given;
mod other_tools;
mod part_store;
mod recorder;
mod shell;
mod show;
mod signals;
mod target;
mod ui;
mod welcome;

use anyhow::Context;
use clap::{CommandFactory, FromArgMatches, Parser};
use std::process::ExitCode;

/// Allocator that reports where no memory is left.
#[global_allocator]
static ALLOCATOR: anemoe_io::ReportingAllocator = anemoe_io::ReportingAllocator;

/// Takes language models, dense and Mixture-of-Experts, to the Apple Neural Engine, and to any CPU.
#[derive(Parser)]
#[command(name = "anemoe", version, max_term_width = 110)]
#[command(
    after_help = "Examples:\n  anemoe quickstart\n  anemoe build models/small-gemma4 -o my.anemoe\n  anemoe generate my.anemoe --prompt 'def main():'\n\nanemoe COMMAND --help says more about a command. Further commands: compile, verify-on-mac and import-report for work with a Mac (docs/mac.md); completions and man for shells."
)]
struct Cli {
    /// Print one JSON document on standard output; progress and messages go to standard error.
    #[arg(long, global = true)]
    json: bool,
    /// Threads to compute with; the default is one per processor.
    #[arg(long, global = true, value_name = "N")]
    threads: Option<usize>,
    /// Fetch nothing: a checkpoint hf:OWNER/NAME is what the cache holds of it.
    #[arg(long, global = true)]
    offline: bool,
    #[command(subcommand)]
    command: Option<commands::AnyCommand>,
}

/// Returns the command line of the program.
fn command_line() -> clap::Command {
    Cli::command()
}

fn main() -> ExitCode {
    let mut command = Cli::command();
    let words = given::with_home(&command, std::env::args_os().collect(), std::env::home_dir());
    let matches = command.try_get_matches_from_mut(words);
    let cli = match matches.and_then(|m| {
        given::remember(&command, &m);
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
    match chosen.run(&ui::Ui::new(cli.json)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => error_report::report(&e, cli.json),
    }
}
