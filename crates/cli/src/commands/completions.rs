//! `anemoe completions`

use crate::command::{Command, CommandReport};
use crate::ui::Ui;
use clap_complete::Shell;
use serde::Serialize;
use std::io;

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

impl Command for Args {
    type Report = Completions;

    fn run(self, _: &Ui) -> anyhow::Result<Completions> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut crate::command_line(), "anemoe", &mut script);
        Ok(Completions { shell: self.shell.to_string(), script: String::from_utf8(script)? })
    }
}

/// Completions of a shell.
#[derive(Serialize)]
pub struct Completions {
    shell: String,
    script: String,
}

impl CommandReport for Completions {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        ui.part(&self.script)
    }
}
