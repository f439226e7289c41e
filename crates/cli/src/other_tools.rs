//! Commands and options of other tools, and their equivalents here.

use clap::error::{ContextKind, ContextValue};
use clap::{Command, Error};
use std::ffi::OsString;

/// Commands here, and their names in other tools.
const COMMANDS: [(&str, &str); 13] = [
    ("generate", "run infer complete completion prompt"),
    ("build", "convert export create make package"),
    ("serve", "server start api"),
    ("validate", "eval evaluate test verify"),
    ("bench", "benchmark perf speed"),
    ("inspect", "info show list ls ps models print"),
    ("perplexity", "ppl score"),
    ("golden", "reference logits"),
    ("journal", "log history"),
    ("report", "diff compare"),
    ("push", "upload publish send"),
    ("pull", "download fetch"),
    ("man", "manual manpage docs"),
];

/// Options here, and their names in other tools.
const OPTIONS: [(&str, &str); 8] = [
    ("max-new", "--n-predict --predict --num-predict --max-tokens --max-new-tokens --n-gen"),
    ("system", "--system-prompt --sys"),
    ("temperature", "--temp"),
    ("max-sequences", "--parallel --max-num-seqs --num-parallel --slots"),
    ("max-queue", "--queue-size"),
    ("chat-template", "--chat-template-file"),
    ("model-name", "--alias --served-model-name"),
    ("output", "--out --outfile --output-dir --mlx-path"),
];

/// Tips for options of other tools that have no equivalent here.
const TIPS: [(&str, &str); 3] = [
    (
        "a bundle has the context that it was built for: anemoe build --max-context N",
        "-c --ctx-size --n-ctx --ctx --context-size --num-ctx --max-model-len --max-seq-len",
    ),
    (
        "the checkpoint or bundle is named without an option, behind the command",
        "-m --model --model-path --hf-path --hf-repo --checkpoint --bundle",
    ),
    ("every layer runs on the backend that --backend names", "--n-gpu-layers --gpu-layers --ngl"),
];

/// Adds the equivalent of another tool's command or option to an error; clap alone may suggest one that merely sounds like
/// it.
pub fn explained(mut e: Error, command: &Command) -> Error {
    if let Some(ContextValue::String(said)) = e.get(ContextKind::InvalidSubcommand) {
        if let Some(meant) = meant(&COMMANDS, said) {
            e.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![meant.to_string()]));
        }
        return e;
    }
    let Some(ContextValue::String(said)) = e.get(ContextKind::InvalidArg) else { return e };
    let said = said.split('=').next().unwrap_or_default();
    let chosen = std::env::args_os().skip(1).find_map(|word| subcommand(command, &word));
    let here = |name: &str| chosen.is_some_and(|c| c.get_arguments().any(|a| a.get_long() == Some(name)));
    if let Some(option) = meant(&OPTIONS, said).filter(|name| here(name)) {
        e.insert(ContextKind::SuggestedArg, ContextValue::String(format!("--{option}")));
    } else if let Some(tip) = meant(&TIPS, said) {
        e.remove(ContextKind::SuggestedArg);
        e.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.to_string().into()]));
    }
    e
}

/// Finds the entry of a table that lists this word.
fn meant(table: &[(&'static str, &str)], said: &str) -> Option<&'static str> {
    table.iter().find(|(_, words)| words.split(' ').any(|word| word == said)).map(|(meant, _)| *meant)
}

fn subcommand<'a>(command: &'a Command, word: &OsString) -> Option<&'a Command> {
    command.get_subcommands().find(|c| word.to_str() == Some(c.get_name()))
}
