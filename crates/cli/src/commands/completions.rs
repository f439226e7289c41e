//! `anemoe completions`

use crate::outcome::Outcome;
use crate::ui::Ui;
use clap::Command;
use clap_complete::Shell;

/// Print the completions of a shell.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe completions bash > ~/.local/share/bash-completion/completions/anemoe\n  anemoe completions zsh > ~/.zfunc/_anemoe\n  anemoe completions fish > ~/.config/fish/completions/anemoe.fish"
)]
pub struct Args {
    /// The shell that reads them.
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(args: Args, mut command: Command, ui: &Ui) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "anemoe", &mut script);
    let script = String::from_utf8(script)?;
    ui.document(&serde_json::json!({"shell": args.shell.to_string(), "script": script}))?;
    ui.part(&script)?;
    Ok(Outcome::Done)
}
