//! `anemoe man`

use crate::command::{Command, Page};
use crate::files::Overwrite;
use crate::ui::Ui;
use anemoe_io::Error;
use clap_mangen::Man;
use serde_json::json;
use std::path::PathBuf;

/// Print the manual page, or write the pages of all commands.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  anemoe man | man -l -\n  anemoe man --out /usr/local/share/man/man1")]
pub struct Args {
    /// Folder for a page of each command: anemoe.1, anemoe-build.1, ...
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
}

impl Command for Args {
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
        let mut root = crate::command_line();
        root.build();
        let Some(folder) = self.out else {
            let page = page(root)?;
            return Ok(Page::new(json!({"page": page}), [page.trim_end()]));
        };
        std::fs::create_dir_all(&folder).map_err(|source| Error::io(&folder, source))?;
        let mut pages = Vec::new();
        collect(&root, &mut pages)?;
        let outputs = pages.iter().map(|(name, _)| self.overwrite.output(&folder.join(name)));
        let outputs: Vec<_> = outputs.collect::<anyhow::Result<_>>()?;
        for ((name, text), output) in pages.iter().zip(outputs) {
            let path = folder.join(name);
            output
                .write(|file| std::io::Write::write_all(file, text.as_bytes()))
                .map_err(|e| Error::io(&path, e))?;
        }
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        let folder = folder.display().to_string();
        let line = format!("{folder}: {} pages", names.len());
        Ok(Page::new(json!({"folder": folder, "pages": names}), [line]))
    }
}

/// Adds the manual pages of a command and of its subcommands.
fn collect(command: &clap::Command, pages: &mut Vec<(String, String)>) -> anyhow::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_string();
    pages.push((format!("{name}.1"), page(command.clone())?));
    for below in command.get_subcommands().filter(|c| c.get_name() != "help" && !c.is_hide_set()) {
        collect(below, pages)?;
    }
    Ok(())
}

fn page(command: clap::Command) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    Man::new(command).render(&mut bytes)?;
    Ok(String::from_utf8(bytes)?)
}
