//! `anemoe completions`

use crate::command::{Command, Page};
use crate::ui::Ui;
use clap_complete::Shell;
use serde_json::json;

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
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut crate::command_line(), "anemoe", &mut script);
        let script = String::from_utf8(script)?;
        let document = json!({"shell": self.shell.to_string(), "script": script});
        Ok(Page::new(document, [script.trim_end()]))
    }
}
