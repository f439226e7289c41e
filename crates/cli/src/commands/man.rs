//! `anemoe man`

use crate::files::Overwrite;
use crate::outcome::Outcome;
use crate::ui::Ui;
use anemoe_io::Error;
use clap::Command;
use clap_mangen::Man;
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

pub fn run(args: Args, mut root: Command, ui: &Ui) -> anyhow::Result<Outcome> {
    root.build();
    let Some(folder) = &args.out else {
        let page = page(root)?;
        ui.document(&serde_json::json!({"page": page}))?;
        ui.part(&page)?;
        return Ok(Outcome::Done);
    };
    std::fs::create_dir_all(folder).map_err(|source| Error::io(folder, source))?;
    let mut pages = Vec::new();
    collect(&root, &mut pages)?;
    let outputs = pages.iter().map(|(name, _)| args.overwrite.output(&folder.join(name)));
    let outputs: Vec<_> = outputs.collect::<anyhow::Result<_>>()?;
    for ((name, text), output) in pages.iter().zip(outputs) {
        let path = folder.join(name);
        output
            .write(|file| std::io::Write::write_all(file, text.as_bytes()))
            .map_err(|e| Error::io(&path, e))?;
    }
    let names: Vec<&String> = pages.iter().map(|(name, _)| name).collect();
    ui.document(&serde_json::json!({"folder": folder.display().to_string(), "pages": names}))?;
    ui.line(format!("{}: {} pages", folder.display(), names.len()))?;
    Ok(Outcome::Done)
}

/// Adds the manual pages of a command and of its subcommands.
fn collect(command: &Command, pages: &mut Vec<(String, String)>) -> anyhow::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_string();
    pages.push((format!("{name}.1"), page(command.clone())?));
    for below in command.get_subcommands().filter(|c| c.get_name() != "help" && !c.is_hide_set()) {
        collect(below, pages)?;
    }
    Ok(())
}

fn page(command: Command) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    Man::new(command).render(&mut bytes)?;
    Ok(String::from_utf8(bytes)?)
}
